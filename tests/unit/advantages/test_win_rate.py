"""Win rates by counting, and SPPO against the loss of its paper (arXiv 2405.00675)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from roll.algorithms import WinRate, build_advantage, build_loss, token_weights
from roll.algorithms.advantages.win_rate import win_rates
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.algorithm import AlgorithmConfig, WinRateConfig
from roll.config.loading.compose import PRESETS
from roll.strategy.training.reduce import weighted_sum
from tests.unit.advantages.test_advantage_families import samples

ETA = 1000.0


def counted(rewards: list[float]) -> list[float]:
    """Wins of each of the rewards against all of them, a draw being half a win."""
    wins = [sum(own > other for other in rewards) for own in rewards]
    draws = [sum(own == other for other in rewards) for own in rewards]
    return [(w + d / 2) / len(rewards) for w, d in zip(wins, draws, strict=True)]


def by_scores(rewards: list[float], scale: float) -> list[float]:
    """Mean chance that a Bradley-Terry model gives each of the rewards."""
    strength = [math.exp(reward / scale) for reward in rewards]
    return [sum(own / (own + other) for other in strength) / len(strength) for own in strength]


@given(st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=60)
def test_a_win_rate_is_a_count_of_wins_within_the_group(groups: list[list[int]]) -> None:
    rewards_B = torch.tensor([float(reward) for rewards in groups for reward in rewards])
    ids_B = torch.tensor([3 - i for i, rewards in enumerate(groups) for _ in rewards])
    halves = [[reward / 2 for reward in rewards] for rewards in groups]
    expected = [rate for rewards in halves for rate in counted(rewards)]
    assert win_rates(rewards_B, ids_B).tolist() == pytest.approx(expected)
    expected = [rate for rewards in halves for rate in by_scores(rewards, 0.7)]
    assert win_rates(rewards_B / 2, ids_B, scale=0.7).tolist() == pytest.approx(expected)


def test_a_lone_sample_and_equal_ones_have_no_advantage() -> None:
    batch = samples([0.3, 0.7, 0.7, 1.0], [0, 1, 1, 2], [1, 2, 1, 3])
    for config in (WinRateConfig(), WinRateConfig(scale=0.5)):
        assert not WinRate(config)(batch).advantages_BT.any()


def paper_loss(logprobs_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, wins_B: Tensor) -> Tensor:
    """Mean over responses of (log(pi / pi_t) - eta * (P(y beats pi_t) - 1/2))**2."""
    gaps_B = ((logprobs_BT - old_BT) * mask_BT).sum(1)
    return (gaps_B - ETA * (wins_B - 0.5)).square().mean()


@pytest.mark.parametrize("moved", [False, True])
def test_the_preset_has_the_gradient_of_the_paper(moved: bool) -> None:
    """Up to a factor of 2 * eta; in the first update of a step and in later ones."""
    content = yaml.safe_load((PRESETS / "sppo.yaml").read_text())["algorithm"]
    config = TypeAdapter(AlgorithmConfig).validate_python(content, strict=False)
    rewards, ids = [0.0, 1.0, 0.5, 0.5, 2.0, 0.0], [0, 0, 0, 0, 1, 1]
    batch = samples(rewards, ids, [3, 1, 2, 4, 2, 2])
    mask_BT = batch.loss_mask
    g = torch.Generator().manual_seed(0)
    old_BT = -torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64)
    new_BT = old_BT + 0.3 * torch.randn(old_BT.shape, generator=g, dtype=torch.float64) * moved
    batch = replace(batch, old_logprobs=old_BT)
    batch = replace(batch, advantages=build_advantage(config)(batch).advantages_BT.double())
    weights_BT = token_weights(mask_BT, config.aggregation).double()
    leaf_BT = new_BT.clone().requires_grad_()
    total = weighted_sum(build_loss(config)(PolicyTerms(leaf_BT), batch).loss_BT, weights_BT)
    total.backward()
    wins_B = torch.tensor(counted(rewards[:4]) + counted(rewards[4:]), dtype=torch.float64)
    twin_BT = new_BT.clone().requires_grad_()
    (paper_loss(twin_BT, old_BT, mask_BT, wins_B) / (2 * ETA)).backward()
    assert leaf_BT.grad is not None
    assert twin_BT.grad is not None
    assert leaf_BT.grad.abs().max() > 0.05
    torch.testing.assert_close(leaf_BT.grad, twin_BT.grad, rtol=1e-6, atol=1e-9)
