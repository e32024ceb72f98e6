"""GPG against the formulas of its paper (arXiv 2504.02546): the gradient that it corrects."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import Gpg, PolicyGradient, SumLoss, token_weights
from roll.algorithms.advantages.gpg import gpg_advantages
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.algorithm import Aggregation, GpgConfig, PgConfig
from roll.core.batches import RolloutBatch
from roll.strategy.training.reduce import weighted_sum
from tests.unit.advantages.test_advantage_families import samples


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6))
@settings(max_examples=80)
def test_the_advantage_is_that_of_the_paper(groups: list[list[int]]) -> None:
    """alpha * (r - mean), alpha = B / (B - M), where M groups have equal rewards."""
    equal = sum(len(set(rewards)) == 1 for rewards in groups)
    expected: list[float] = []
    for rewards in groups:
        mean = Fraction(sum(rewards), len(rewards))
        alpha = Fraction(len(groups), max(len(groups) - equal, 1))
        expected += [float(alpha * (reward - mean)) for reward in rewards]
    rewards_B = torch.tensor([float(reward) for rewards in groups for reward in rewards])
    ids_B = torch.tensor([-i for i, rewards in enumerate(groups) for _ in rewards])
    found_B = gpg_advantages(rewards_B, ids_B)
    assert found_B.dtype == torch.float64
    assert found_B.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_step_without_a_group_whose_rewards_differ_trains_nothing() -> None:
    batch = samples([0.1, 0.1, 0.7, 0.7], [0, 0, 1, 1], [2, 1, 2, 1])
    assert not Gpg(GpgConfig())(batch).advantages_BT.any()


def gradient(batch: RolloutBatch, logprobs_BT: Tensor) -> Tensor:
    """The gradient by the log-probs of the loss as the preset has it: plain, a mean over tokens."""
    found = Gpg(GpgConfig())(batch)
    batch = replace(batch, advantages=found.advantages_BT)
    leaf_BT = logprobs_BT.clone().requires_grad_()
    loss_BT = SumLoss((PolicyGradient(PgConfig()),))(PolicyTerms(leaf_BT), batch).loss_BT
    weighted_sum(loss_BT, token_weights(batch.loss_mask, Aggregation.TOKEN_MEAN)).backward()
    assert leaf_BT.grad is not None
    return leaf_BT.grad


def test_groups_of_equal_rewards_change_no_step() -> None:
    """Equation 7: the mean gradient over the groups is the mean over those that have one."""
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.2, 0.9, 0.4]
    ids = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    batch = samples(rewards, ids, [4] * 12)
    logprobs_BT = -torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    kept = [row for row in range(12) if ids[row] in (0, 3)]
    whole_BT = gradient(batch, logprobs_BT)
    torch.testing.assert_close(whole_BT[kept], gradient(batch.select(kept), logprobs_BT[kept]))
    assert not whole_BT[3:9].any()
    # Of the four groups two have a gradient: twice that of the plain baseline.
    token = torch.tensor([2 / 3, -1 / 3, -1 / 3]) * 2 / (12 * 4)
    torch.testing.assert_close(whole_BT[:3, 0], -token)
