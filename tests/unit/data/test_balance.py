"""Rows ordered so that equal parts hold equal work."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.balance import balanced_order


def _totals(lengths: list[int], order: list[int], parts: int) -> list[int]:
    size = len(lengths) // parts
    return [sum(lengths[row] for row in order[i * size : (i + 1) * size]) for i in range(parts)]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], int]:
    parts, rounds = draw(st.integers(1, 8)), draw(st.integers(0, 12))
    lengths = st.lists(st.integers(1, 4096), min_size=parts * rounds, max_size=parts * rounds)
    return draw(lengths), parts


@given(_cases())
def test_the_order_is_a_permutation_and_parts_differ_by_at_most_one_row(
    case: tuple[list[int], int],
) -> None:
    lengths, parts = case
    order = balanced_order(lengths, parts)
    assert sorted(order) == list(range(len(lengths)))
    if lengths:
        totals = _totals(lengths, order, parts)
        assert max(totals) - min(totals) <= max(lengths) - min(lengths)


def test_the_heaviest_part_is_near_the_best_possible() -> None:
    lengths = [31, 7, 22, 5, 18, 9, 27, 3]
    best = min(max(_totals(lengths, list(order), 2)) for order in permutations(range(8)))
    assert max(_totals(lengths, balanced_order(lengths, 2), 2)) <= 1.05 * best


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows do not divide into 2"):
        balanced_order([1, 2, 3, 4, 5], 2)
