"""A hundred random cases; `python -m tests.convert.fuzz` runs thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.fuzz import run_case, run_ended

SEED = 7


@pytest.mark.parametrize("first", range(0, 88, 22))
def test_random_models_are_exact_and_random_damage_is_refused(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 22):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_case(number, SEED, folder)


def test_conversions_that_end_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    assert run_ended(12, SEED, tmp_path).total() == 12
