"""What pytest's workers share: who runs which tests, and turns of tests that look at the clock."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAITING = ("faults", "distributed", "packages")
"""Folders whose tests mostly wait for processes that they have started, the longest first."""
COMPUTING = ("contract", "convert", "pipelines")
"""Folders whose tests compute for long."""


def in_groups(names: Iterable[str], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return parameters of a fixture whose tests any worker may run, one worker for each name."""
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks]) for name in names]


def in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Order tests so that some that wait for other processes run beside some that compute.

    Groups of the folders `WAITING` are spread evenly among those of the folders `COMPUTING`. All
    others come after them, and at the end the groups with tests marked `alone`, for which everybody
    waits: there only short tests are under way.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    waiting: list[list[pytest.Item]] = []
    computing: list[list[pytest.Item]] = []
    short: list[list[pytest.Item]] = []
    alone: list[list[pytest.Item]] = []
    for group in groups.values():
        folder = group[0].path.relative_to(Path(__file__).parent).parts[0]
        if any(item.get_closest_marker("alone") for item in group):
            alone.append(group)
        elif folder in WAITING:
            waiting.append(group)
        else:
            (computing if folder in COMPUTING else short).append(group)
    waiting.sort(key=lambda group: WAITING.index(group[0].path.parent.name))
    placed = [
        ((i + 0.5) / len(kind), group)
        for kind in (waiting, computing)
        for i, group in enumerate(kind)
    ]
    mixed = [group for _, group in sorted(placed, key=lambda each: each[0])]
    return [item for group in (*mixed, *short, *alone) for item in group]


def group_of(item: pytest.Item) -> str:
    """Return the name of the group of tests that one worker runs, as pytest-xdist forms it."""
    return "_".join(sorted({mark.args[0] for mark in item.iter_markers("xdist_group")}))


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
