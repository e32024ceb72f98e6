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


@given(_cases())
def test_no_swap_of_two_rows_brings_the_heaviest_and_the_lightest_part_closer(
    case: tuple[list[int], int],
) -> None:
    lengths, parts = case
    order, size = balanced_order(lengths, parts), len(lengths) // parts
    totals = _totals(lengths, order, parts)
    heavy, light = totals.index(max(totals)), totals.index(min(totals))
    of_heavy, of_light = (order[at * size : (at + 1) * size] for at in (heavy, light))
    gap = totals[heavy] - totals[light]
    moves = {lengths[i] - lengths[j] for i in of_heavy for j in of_light}
    assert not [moved for moved in moves if 0 < moved < gap]


def test_rows_of_a_part_keep_their_order() -> None:
    assert balanced_order([9, 1, 5, 5], 2) == [0, 1, 2, 3]
    assert balanced_order([5, 9, 5, 1], 2) == [1, 3, 0, 2]


def test_the_heaviest_part_is_near_the_best_possible() -> None:
    lengths = [31, 7, 22, 5, 18, 9, 27, 3]
    best = min(max(_totals(lengths, list(order), 2)) for order in permutations(range(8)))
    assert max(_totals(lengths, balanced_order(lengths, 2), 2)) <= 1.05 * best


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows do not divide into 2"):
        balanced_order([1, 2, 3, 4, 5], 2)
