"""What pytest's workers share: who runs which tests, and turns of tests that look at the clock."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def in_groups(names: Iterable[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return parameters of a fixture whose tests any worker may run, one worker for each name."""
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks]) for name in names]


@contextmanager
def turn(config: pytest.Config, *, alone: bool) -> Iterator[None]:
    """Wait until the test may run. Without several workers it may at once.

    Args:
        alone: wait until no other test runs, and let none begin.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"roll_tests_{worker['testrunuid']}"
    # Whoever waits for the room holds the door, so no test can begin before one that waits alone.
    with path.with_suffix(".door").open("w") as door, path.with_suffix(".room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Closing is not enough where the test has forked: the child holds the lock as well.
            fcntl.flock(room, fcntl.LOCK_UN)
