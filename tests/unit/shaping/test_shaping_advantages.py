"""Whitened and clipped advantages against loops over the trained tokens."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from roll.algorithms import build_shaping
from roll.config.algorithm import (
    AdvantageShapingConfig,
    AlgorithmConfig,
    ClipAdvantageConfig,
    WhitenAdvantageConfig,
)
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch


def estimated(rows: int = 6, seed: int = 0) -> RolloutBatch:
    """Advantages on trained tokens; NaN and infinity elsewhere, which must not matter."""
    batch = rollout_batch(rows, seed=seed)
    g = torch.Generator().manual_seed(seed)
    values_BT = 3 * torch.randn(batch.tokens.shape, generator=g) + 0.7
    junk_BT = torch.where(torch.rand(values_BT.shape, generator=g) < 0.5, torch.nan, torch.inf)
    advantages_BT = torch.where(batch.loss_mask, values_BT, junk_BT)
    return replace(batch, advantages=advantages_BT, returns=advantages_BT.clone())


def shape(batch: RolloutBatch, *parts: AdvantageShapingConfig) -> Tensor:
    shaped, _ = build_shaping(
        AlgorithmConfig(advantage_shaping=parts), max_new_tokens=64
    ).advantages(batch)
    assert shaped.advantages is not None
    assert shaped.advantages.dtype == torch.float32
    assert shaped.returns is batch.returns
    assert (shaped.advantages[~batch.loss_mask] == 0).all()
    return shaped.advantages


@pytest.mark.parametrize("mean", [True, False])
@given(seed=st.integers(0, 300), rows=st.integers(1, 6))
@settings(max_examples=40)
def test_whitening_matches_the_loop_over_trained_tokens(mean: bool, seed: int, rows: int) -> None:
    batch = estimated(rows, seed)
    assert batch.advantages is not None
    tokens = [float(x) for x in batch.advantages[batch.loss_mask].tolist()]
    center = statistics.fmean(tokens) if mean else 0.0
    std = statistics.stdev(tokens) + 1e-6 if len(tokens) > 1 else 1.0
    found_BT = shape(batch, WhitenAdvantageConfig(mean=mean))
    expected = [(x - center) / std for x in tokens]
    assert found_BT[batch.loss_mask].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_whitened_advantages_have_mean_zero_and_unit_spread() -> None:
    batch = estimated(32)
    tokens = shape(batch, WhitenAdvantageConfig())[batch.loss_mask].double()
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std().item() == pytest.approx(1, rel=1e-5)


def test_without_the_mean_no_advantage_changes_its_sign() -> None:
    batch = estimated(32)
    assert batch.advantages is not None
    found_BT = shape(batch, WhitenAdvantageConfig(mean=False))
    inside_BT = batch.loss_mask
    assert torch.equal(found_BT[inside_BT].sign(), batch.advantages[inside_BT].sign())


@pytest.mark.parametrize(("mean", "expected"), [(True, 0.0), (False, 0.3)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_equal_advantages_and_a_single_one_are_not_divided(
    mean: bool, expected: float, tokens: int
) -> None:
    batch = estimated(1)
    mask_BT = torch.zeros_like(batch.loss_mask)
    mask_BT[0, :tokens] = True
    batch = replace(batch, loss_mask=mask_BT, advantages=torch.full(mask_BT.shape, 0.3))
    found_BT = shape(batch, WhitenAdvantageConfig(mean=mean))
    assert found_BT[mask_BT].tolist() == pytest.approx([expected] * tokens, rel=1e-6, abs=1e-9)


def test_nothing_trained_gives_zeros() -> None:
    batch = estimated()
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert (shape(batch, WhitenAdvantageConfig(), ClipAdvantageConfig(limit=1.0)) == 0).all()


def test_advantages_are_clipped_on_both_sides_and_counted() -> None:
    batch = replace(
        rollout_batch(1, prompt=1, longest=4),
        loss_mask=torch.tensor([[False, True, True, True, True]]),
        advantages=torch.tensor([[9.0, -3.0, 0.5, 2.0, 2.5]]),
    )
    config = AlgorithmConfig(advantage_shaping=(ClipAdvantageConfig(limit=2.0),))
    shaped, metrics = build_shaping(config, max_new_tokens=64).advantages(batch)
    assert shaped.advantages is not None
    assert shaped.advantages.tolist() == [[0, -2, 0.5, 2, 2]]
    assert metrics.values_by_name() == {"shaping/advantage/clip/clipped_fraction": 0.5}


def test_shapings_are_applied_in_the_order_of_the_config() -> None:
    batch = estimated(16)
    whiten, clip = WhitenAdvantageConfig(), ClipAdvantageConfig(limit=0.5)
    assert shape(batch, whiten, clip).abs().max() == 0.5
    assert shape(batch, clip, whiten).abs().max() > 0.5


def test_padding_and_the_order_of_rows_change_nothing() -> None:
    batch = estimated(7)
    whiten = WhitenAdvantageConfig()
    whole_BT = shape(batch, whiten)
    order = torch.randperm(7)
    torch.testing.assert_close(shape(batch.select(order), whiten), whole_BT[order])
    zeros_BT = torch.zeros(1, 72)
    wide = replace(rollout_batch(1, prompt=60), advantages=zeros_BT, returns=zeros_BT)
    longer = RolloutBatch.concat([batch, wide]).select(range(7))
    padded_BT = shape(longer, whiten)
    torch.testing.assert_close(padded_BT[:, : whole_BT.shape[1]], whole_BT)
    assert (padded_BT[:, whole_BT.shape[1] :] == 0).all()


def test_missing_advantages_name_the_step_that_makes_them() -> None:
    with pytest.raises(ValueError, match="run add_advantages"):
        shape(rollout_batch(), WhitenAdvantageConfig())


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        ClipAdvantageConfig(limit=0.0)
