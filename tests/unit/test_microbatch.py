"""Micro-batches by token budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.strategy.training.microbatch import plan, take
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
