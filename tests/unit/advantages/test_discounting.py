"""Discounted sums and the packing of trained tokens, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.trained import TrainedTokens


def sums_by_a_loop(values: list[float], decay: float) -> list[float]:
    found, later = [], 0.0
    for value in reversed(values):
        later = value + decay * later
        found.append(later)
    return found[::-1]


@given(
    rows=st.integers(1, 4),
    steps=st.sampled_from([0, 1, 17, 63, 64, 65, 128, 300]),
    decays=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 0.95, 0.999, 1.0]), min_size=4, max_size=4),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_discounted_sums_match_the_recursion(
    rows: int, steps: int, decays: list[float], shared: bool, seed: int
) -> None:
    values_BT = torch.randn(rows, steps, generator=torch.Generator().manual_seed(seed)) * 100
    decays = decays[:1] if shared else decays[:rows]
    found_BT = discounted_sums(values_BT, torch.tensor(decays))
    assert found_BT.dtype == torch.float64
    assert found_BT.shape == values_BT.shape
    for row, values_T in enumerate(values_BT):
        # The decay as float32 holds it, which is what the function was given.
        decay = torch.tensor(decays[0 if shared else row]).item()
        expected = sums_by_a_loop(values_T.tolist(), decay)
        assert found_BT[row].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-10)


def test_a_large_value_far_behind_does_not_blur_what_precedes_it() -> None:
    values_BT = torch.zeros(1, 1000, dtype=torch.float64)
    values_BT[0, 0], values_BT[0, 999] = 1.0, 1e9
    found_BT = discounted_sums(values_BT, torch.tensor([0.5], dtype=torch.float64))
    assert found_BT[0, 0].item() == 1.0
    assert found_BT[0, 998].item() == 5e8


@pytest.mark.parametrize("steps", [1, 64, 128])
def test_what_is_summed_stays_as_it_was(steps: int) -> None:
    values_BT = torch.ones(2, steps, dtype=torch.float64)
    discounted_sums(values_BT, torch.tensor([0.5], dtype=torch.float64))
    assert (values_BT == 1).all()


def test_trained_tokens_move_side_by_side_and_back() -> None:
    mask_BT = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    nan = float("nan")
    values_BT = torch.tensor([[nan, 6, nan, 8], [nan, 2, nan, nan], [nan] * 4])
    tokens = TrainedTokens.of(mask_BT)
    packed_BL = tokens.pack(values_BT)
    assert packed_BL.tolist() == [[6, 8], [2, 0], [0, 0]]
    paid_BL = torch.ones(3, 2)
    tokens.add_at_last(paid_BL, torch.tensor([1.0, 2.0, nan]))
    assert paid_BL.tolist() == [[1, 2], [3, 1], [1, 1]]
    assert tokens.unpack(packed_BL).tolist() == [[0, 6, 0, 8], [0, 2, 0, 0], [0] * 4]


def test_a_batch_without_trained_tokens_packs_to_zeros() -> None:
    tokens = TrainedTokens.of(torch.zeros(2, 3).bool())
    assert not tokens.pack(torch.full((2, 3), float("inf"))).any()
    assert not tokens.unpack(torch.ones(2, 3)).any()


def test_tokens_without_a_gap_stay_where_they_are() -> None:
    mask_BT = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    values_BT = torch.arange(16.0).view(4, 4).masked_fill(~mask_BT, float("nan"))
    tokens = TrainedTokens.of(mask_BT)
    packed_BL = tokens.pack(values_BT)
    assert packed_BL.tolist() == [[0, 1, 2, 0], [4, 5, 6, 7], [0, 0, 0, 11], [0, 0, 0, 0]]
    tokens.add_at_last(packed_BL, torch.tensor([100.0, 200.0, 300.0, float("nan")]))
    assert packed_BL.tolist() == [[0, 1, 102, 0], [4, 5, 6, 207], [0, 0, 0, 311], [0, 0, 0, 0]]
    assert tokens.unpack(packed_BL + 1).tolist() == [
        [0, 2, 103, 0],
        [5, 6, 7, 208],
        [0, 0, 0, 312],
        [0, 0, 0, 0],
    ]
