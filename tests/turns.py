"""Turns of pytest's workers: tests that look at the clock run while no other test does."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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
