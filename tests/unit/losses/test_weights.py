"""Token weights against loops that spell each aggregation out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.weights import row_weights, token_weights
from roll.config.algorithm import Aggregation

MAX_TOKENS = 7
rows_of_bits = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6)


def aggregate_by_loops(
    losses: list[list[float]], mask: list[list[bool]], mode: Aggregation
) -> float:
    sequences = [
        [x for x, on in zip(row, bits, strict=True) if on]
        for row, bits in zip(losses, mask, strict=True)
    ]
    sequences = [tokens for tokens in sequences if tokens]
    if not sequences:
        return 0.0
    if mode is Aggregation.TOKEN_MEAN:
        tokens = [x for sequence in sequences for x in sequence]
        return sum(tokens) / len(tokens)
    per_sequence = {
        Aggregation.SEQUENCE_MEAN: [sum(s) / len(s) for s in sequences],
        Aggregation.SEQUENCE_SUM: [sum(s) for s in sequences],
        Aggregation.CONSTANT: [sum(s) / MAX_TOKENS for s in sequences],
    }[mode]
    return sum(per_sequence) / len(per_sequence)


@pytest.mark.parametrize("mode", Aggregation)
@given(bits=rows_of_bits, seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_the_weighted_sum_is_the_aggregation(
    mode: Aggregation, bits: list[list[bool]], seed: int
) -> None:
    losses_BT = torch.randn(len(bits), 4, generator=torch.Generator().manual_seed(seed)).double()
    weights_BT = token_weights(torch.tensor(bits), mode, max_tokens=MAX_TOKENS)
    assert weights_BT.dtype == torch.float32
    assert (weights_BT[~torch.tensor(bits)] == 0).all()
    found = (losses_BT * weights_BT.double()).sum().item()
    assert found == pytest.approx(
        aggregate_by_loops(losses_BT.tolist(), bits, mode), rel=1e-6, abs=1e-6
    )


def test_the_rows_of_a_sample_are_one_sequence_where_tokens_are_summed() -> None:
    """Two samples of two tokens each, one of them in two rows; a third row fills up."""
    tokens_B = torch.tensor([2, 1, 1, 0])

    def weights(mode: Aggregation) -> list[float]:
        found: list[float] = row_weights(
            tokens_B, mode, max_tokens=MAX_TOKENS, samples=["a", "b", "b", "c"]
        ).tolist()
        return found[:3]

    assert weights(Aggregation.SEQUENCE_SUM) == [1 / 2] * 3
    assert weights(Aggregation.CONSTANT) == [1 / 2 / MAX_TOKENS] * 3
    assert weights(Aggregation.SEQUENCE_MEAN) == pytest.approx([1 / 6, 1 / 3, 1 / 3])


@pytest.mark.parametrize("mode", [Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_MEAN])
def test_the_weights_of_a_mean_add_up_to_one(mode: Aggregation) -> None:
    mask_BT = torch.rand(50, 300) < torch.rand(50, 1)
    assert token_weights(mask_BT, mode).double().sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mode", Aggregation)
def test_uneven_micro_batches_in_any_order_add_up_to_the_whole(mode: Aggregation) -> None:
    mask_BT = torch.rand(10, 20) < 0.5
    losses_BT = torch.randn(10, 20).double()
    weights_BT = token_weights(mask_BT, mode, max_tokens=20).double()
    whole = (losses_BT * weights_BT).sum()
    parts = torch.split(torch.randperm(10), [1, 6, 3])
    split = sum((losses_BT[rows] * weights_BT[rows]).sum() for rows in parts)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", Aggregation)
def test_rows_without_trained_tokens_change_nothing(mode: Aggregation) -> None:
    mask_BT = torch.rand(4, 9) < 0.6
    longer_BT = torch.cat([mask_BT, torch.zeros(3, 9, dtype=torch.bool)])
    weights_BT = token_weights(mask_BT, mode, max_tokens=9)
    assert torch.equal(token_weights(longer_BT, mode, max_tokens=9)[:4], weights_BT)


def test_the_smallest_divisor_of_constant_aggregation_is_one() -> None:
    mask_BT = torch.tensor([[True, True], [True, False]])
    weights_BT = token_weights(mask_BT, Aggregation.CONSTANT, max_tokens=1)
    assert torch.equal(weights_BT, mask_BT / 2)


@pytest.mark.parametrize("max_tokens", [None, 0])
def test_constant_aggregation_without_its_divisor_says_what_to_pass(max_tokens: int | None) -> None:
    with pytest.raises(ValueError, match="aggregation_tokens"):
        token_weights(torch.ones(1, 1).bool(), Aggregation.CONSTANT, max_tokens=max_tokens)
