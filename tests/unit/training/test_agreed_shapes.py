"""Shapes of micro-batches on which ranks agree (Megatron with experts on several ranks)."""

from __future__ import annotations

from itertools import zip_longest

from hypothesis import given
from hypothesis import strategies as st

from roll.strategy.megatron.shapes import NO_UNIT, Part, UnitSize, plan, sizes_of_units
from roll.strategy.training import microbatch

rows_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=12), min_size=1, max_size=3
)
Row = tuple[int, int]


def plans(ranks: list[list[Row]], budget: int, unit: int, *, equal: bool) -> list[list[Part]]:
    """The parts of each rank; its rows are lengths and numbers of patches."""
    units = [
        sizes_of_units([length for length, _ in rows], [seen for _, seen in rows], unit)
        for rows in ranks
    ]
    places = zip_longest(*(sizes for _, sizes in units), fillvalue=NO_UNIT)
    largest = [
        UnitSize(max(each.longest for each in place), max(each.patches for each in place))
        for place in places
    ]
    return [plan(starts, largest, budget, unit=unit, equal=equal) for starts, _ in units]


@given(rows_of_ranks, st.integers(1, 200), st.integers(1, 2), st.booleans())
def test_ranks_have_equal_shapes_within_the_budget_that_hold_all_rows(
    ranks: list[list[Row]], budget: int, unit: int, equal: bool
) -> None:
    ranks = [rows * unit for rows in ranks]
    found = plans(ranks, budget, unit, equal=equal)
    assert len({tuple((part.num_rows, part.width) for part in parts) for parts in found}) == 1
    for rows, parts in zip(ranks, found, strict=True):
        assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
        for part in parts:
            own = [rows[row] for row in part.rows]
            assert len(own) <= part.num_rows
            assert max((length for length, _ in own), default=0) <= part.width
            tokens = part.num_rows * part.width
            assert part.num_rows == unit or tokens <= budget
            full = equal or sum(seen for _, seen in own) + len(own) * part.width <= budget
            assert full or len(own) == unit
    if equal:
        assert len({(part.num_rows, part.width) for part in found[0]}) <= 1


@given(rows_of_ranks, st.integers(1, 200))
def test_a_rank_alone_has_the_plan_of_its_own_rows(ranks: list[list[Row]], budget: int) -> None:
    rows = ranks[0]
    lengths, patches = [length for length, _ in rows], [seen for _, seen in rows]
    (parts,) = plans([rows], budget, 1, equal=False)
    assert [part.rows for part in parts] == microbatch.plan(lengths, budget, patches=patches)
    assert all(part.width == max(lengths[row] for row in part.rows) for part in parts)
    assert all(part.num_rows == len(part.rows) for part in parts)


def test_one_long_row_of_another_rank_does_not_widen_the_short_ones() -> None:
    long, short = [(1024, 0)] * 15 + [(32768, 0)], [(1024, 0)] * 16
    first, second = plans([long, short], 32768, 1, equal=False)
    assert [(part.num_rows, part.width) for part in first] == [(1, 32768), (15, 1024)]
    assert [part.rows for part in first] == [[15], list(range(15))]
    assert [part.rows for part in second] == [[0], list(range(1, 16))]
