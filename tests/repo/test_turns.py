"""The order in which pytest's workers take tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.turns
from tests.turns import in_turn

TESTS = Path(tests.turns.__file__).parent


class Item:
    """As much of a pytest item as `in_turn` reads."""

    def __init__(self, name: str, *marks: pytest.Mark) -> None:
        self.path = TESTS / name
        self.marks = [pytest.mark.xdist_group(name).mark, *marks]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def test_waiting_tests_run_beside_computing_ones_and_those_alone_at_the_end() -> None:
    names = ["contract/a", "contract/b", "contract/b", "convert/c", "convert/d"]
    names += ["distributed/e", "faults/f", "unit/core/g"]
    last = Item("pipelines/h", pytest.mark.alone.mark)
    items = [last, *map(Item, names)]
    order = [str(item.path.relative_to(TESTS)) for item in in_turn(items)]  # type: ignore[arg-type]
    assert order == [
        *("contract/a", "faults/f", "contract/b", "contract/b", "convert/c", "distributed/e"),
        *("convert/d", "unit/core/g", "pipelines/h"),
    ]
