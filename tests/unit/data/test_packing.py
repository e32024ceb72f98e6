"""Packing against its promises and a first-fit loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.packing import pack


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        for i, room in enumerate(rooms):
            if room >= length:
                rooms[i] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_every_sequence_is_in_one_bin_that_holds_it_and_bins_are_few(lengths: list[int]) -> None:
    bins = pack(lengths, 50)
    assert sorted(row for one in bins for row in one) == list(range(len(lengths)))
    assert all(one and sum(lengths[row] for row in one) <= 50 for one in bins)
    assert len(bins) <= first_fit_decreasing(lengths, 50)


def test_best_fit_saves_a_bin_where_first_fit_needs_one_more() -> None:
    lengths = [15, 9, 7, 4, 3, 2]
    assert first_fit_decreasing(lengths, 20) == 3
    assert pack(lengths, 20) == [[0, 4, 5], [1, 2, 3]]


def test_what_cannot_fit_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens; a bin takes 1 to 10"):
        pack([3, 11], 10)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        pack([0], 10)
