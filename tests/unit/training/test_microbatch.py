"""Micro-batches by token budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, zip_longest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.parallel.packing import pack
from roll.core.pictures import Pictures
from roll.strategy.megatron.batches.micro import Micro
from roll.strategy.megatron.batches.shapes import (
    NO_UNIT,
    Part,
    UnitSize,
    plan_packed,
    sizes_of_units,
)
from roll.strategy.megatron.batches.shapes import plan as agreed_plan
from roll.strategy.training.microbatch import plan, plan_of, take
from tests.tiny import rollout_batch

lengths_lists = st.lists(st.integers(1, 40), max_size=60)
longer_lists = st.lists(st.integers(1, 600), max_size=60)


@given(lengths_lists, st.integers(1, 200))
def test_every_row_comes_once_and_padded_tokens_stay_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    parts = plan(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[row] for row in part)
        assert len(part) == 1 or len(part) * longest <= budget


@given(lengths_lists, st.integers(1, 200))
def test_rows_come_by_falling_length_and_equal_ones_in_order(
    lengths: list[int], budget: int
) -> None:
    order = [row for part in plan(lengths, budget) for row in part]
    assert order == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


@given(longer_lists, st.integers(1, 10_000))
def test_a_part_ends_only_where_it_is_full_or_padding_would_cost_more(
    lengths: list[int], budget: int
) -> None:
    parts = plan(lengths, budget)
    for i, (part, following) in enumerate(pairwise(parts)):
        longest = lengths[part[0]]
        room = budget // longest - len(part)
        later = sum(len(rest) for rest in parts[i + 1 :])
        padding = min(room, later) * (longest - lengths[following[0]])
        assert room <= 0 or padding > max(budget / 32, 128)


def test_a_few_long_rows_do_not_pad_the_many_short_ones() -> None:
    parts = plan([15, *[13] * 500, 15, 14], 16384)
    assert [len(part) for part in parts] == [3, 500]
    assert plan([15, *[13] * 50], 16384) == [list(range(51))]


def test_taken_rows_are_cut_to_the_longest_and_their_padding_is_a_token_id() -> None:
    batch = rollout_batch(6)
    at = torch.arange(batch.tokens.shape[1])
    dirty = batch.tokens.masked_fill(at >= batch.lengths[:, None], -100)
    batch = replace(batch, tokens=dirty)
    rows = [4, 1]
    part = take(batch, rows)
    longest = int(batch.lengths[rows].max())
    assert part.tokens.shape == (2, longest)
    assert part.loss_mask.shape == (2, longest)
    assert part.sample_ids == [batch.sample_ids[4], batch.sample_ids[1]]
    for i, row in enumerate(rows):
        length = int(batch.lengths[row])
        assert torch.equal(part.tokens[i, :length], batch.tokens[row, :length])
        assert bool((part.tokens[i, length:] == 0).all())
    assert torch.equal(batch.tokens, dirty)  # the caller's batch stays as it was


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=60),
    st.integers(1, 200),
    st.booleans(),
)
def test_patches_count_as_tokens(rows: list[tuple[int, int]], budget: int, packed: bool) -> None:
    lengths, patches = [row[0] for row in rows], [row[1] for row in rows]
    parts = plan(lengths, budget, packed=packed, patches=patches)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        own = [lengths[row] for row in part]
        tokens = sum(own) if packed else len(part) * max(own)
        assert len(part) == 1 or tokens + sum(patches[row] for row in part) <= budget


pair_of_rows = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=2, max_size=2)


@given(st.lists(pair_of_rows, max_size=30), st.integers(1, 200), st.booleans())
def test_pairs_of_unequal_rows_stay_together_and_within_the_budget(
    pairs: list[list[tuple[int, int]]], budget: int, packed: bool
) -> None:
    lengths = [length for pair in pairs for length, _ in pair]
    patches = [seen for pair in pairs for _, seen in pair]
    parts = plan(lengths, budget, unit=2, packed=packed, patches=patches)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert all(
            row % 2 == 0 and row + 1 == other
            for row, other in zip(part[::2], part[1::2], strict=True)
        )
        own = [lengths[row] for row in part]
        tokens = sum(own) if packed else len(part) * max(own)
        assert len(part) == 2 or tokens + sum(patches[row] for row in part) <= budget


@given(longer_lists, st.integers(1, 10_000), st.booleans())
def test_rows_without_pictures_are_planned_as_ever(
    lengths: list[int], budget: int, packed: bool
) -> None:
    none = [0] * len(lengths)
    assert plan(lengths, budget, packed=packed, patches=none) == plan(
        lengths, budget, packed=packed
    )


def test_patches_of_a_pair_belong_to_both_rows() -> None:
    lengths, patches = [10] * 8, [12, 0, 0, 12, 0, 0, 0, 0]
    assert plan(lengths, 40, unit=2, patches=patches) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert plan(lengths, 64, unit=2, patches=patches) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_is_planned_with_the_patches_of_its_pictures() -> None:
    pictures = Pictures((0,), ((1, 4, 6),), None)  # type: ignore[arg-type]
    batch = replace(rollout_batch(4), pictures=[pictures, None, pictures, None])
    longest = int(batch.lengths.max())
    assert len(plan_of(batch, 4 * longest + 48)) == 1
    assert len(plan_of(batch, 4 * longest + 24)) == 2


rows_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=12), min_size=1, max_size=3
)
Row = tuple[int, int]


def plans_of_ranks(
    ranks: list[list[Row]], budget: int, unit: int, *, equal: bool
) -> list[list[Part]]:
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
    return [agreed_plan(starts, largest, budget, unit=unit, equal=equal) for starts, _ in units]


@given(rows_of_ranks, st.integers(1, 200), st.integers(1, 2), st.booleans())
def test_ranks_have_equal_shapes_within_the_budget_that_hold_all_rows(
    ranks: list[list[Row]], budget: int, unit: int, equal: bool
) -> None:
    ranks = [rows * unit for rows in ranks]
    found = plans_of_ranks(ranks, budget, unit, equal=equal)
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
    (parts,) = plans_of_ranks([rows], budget, 1, equal=False)
    assert [part.rows for part in parts] == plan(lengths, budget, patches=patches)
    assert all(part.width == max(lengths[row] for row in part.rows) for part in parts)
    assert all(part.num_rows == len(part.rows) for part in parts)


def test_one_long_row_of_another_rank_does_not_widen_the_short_ones() -> None:
    long, short = [(1024, 0)] * 15 + [(32768, 0)], [(1024, 0)] * 16
    first, second = plans_of_ranks([long, short], 32768, 1, equal=False)
    assert [(part.num_rows, part.width) for part in first] == [(1, 32768), (15, 1024)]
    assert [part.rows for part in first] == [[15], list(range(15))]
    assert [part.rows for part in second] == [[0], list(range(1, 16))]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=24),
    st.integers(1, 200),
    st.integers(1, 2),
    st.sampled_from([None, 2, 3]),
)
def test_packed_parts_hold_all_rows_within_the_budget_longest_first(
    rows: list[tuple[int, int]], budget: int, unit: int, turns: int | None
) -> None:
    rows = [row for row in rows for _ in range(unit)]
    lengths, patches = [length for length, _ in rows], [seen for _, seen in rows]
    parts = plan_packed(lengths, patches, budget, unit=unit, turns=turns)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
    loads = [
        sum(length + seen for length, seen in rows[i : i + unit]) for i in range(0, len(rows), unit)
    ]
    for part in parts:
        assert part.num_rows == 1
        assert all(
            row == part.rows[i - i % unit] + i % unit and part.rows[i - i % unit] % unit == 0
            for i, row in enumerate(part.rows)
        )
        total = sum(lengths[row] + patches[row] for row in part.rows)
        assert total <= budget or len(part.rows) == unit or (turns and total <= max(loads))
        own = sum(lengths[row] for row in part.rows)
        assert own == part.width if turns is None else own <= part.width
    widths = [part.width for part in parts]
    assert widths == sorted(widths, reverse=True)
    if turns is not None:
        assert len(parts) % turns == 0
        assert len(set(widths)) <= 1


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.sampled_from([1, 4, 6]),
    st.integers(0, 9),
    st.data(),
)
def test_tokens_of_packed_rows_are_found_in_the_one_row(
    lengths: list[int], each: int, more: int, data: st.DataObject
) -> None:
    """Rows -> packed -> rows: by values that say where they come from."""
    batch = rollout_batch(len(lengths))
    width = max(lengths) + data.draw(st.integers(0, 3))
    values_BT = torch.arange(len(lengths) * width).reshape(-1, width) + 1
    batch = replace(batch, tokens=values_BT, lengths=torch.tensor(lengths))
    cut = [row[:length] for row, length in zip(values_BT, lengths, strict=True)]
    whole = sum(-(-length // each) * each for length in lengths) + more * each
    packed = pack(cut, each_multiple=each, length=whole)
    micro = Micro(range(len(lengths)), batch, packed.tokens_BT, packed.positions_BT, packed)
    real_BT = torch.arange(width) < batch.lengths[:, None]
    flat_N = real_BT.flatten().nonzero().flatten()
    places_N = micro.places(flat_N)
    assert torch.equal(packed.tokens_BT[0, places_N], values_BT.flatten()[flat_N])
    assert torch.equal(packed.positions_BT[0, places_N], flat_N % width)
    assert sum(micro.lengths) == whole
    assert all(span % each == 0 for span in micro.lengths)
    padding = set(micro.padding_BT.nonzero()[:, 1].tolist())
    assert padding == set(range(whole)) - set(places_N.tolist())
    assert [part.tolist() for part in packed.split(packed.tokens_BT[0])] == [
        c.tolist() for c in cut
    ]
