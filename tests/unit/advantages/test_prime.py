"""Implicit process rewards (PRIME, arXiv 2502.01456) against numpy and loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms import OutcomeLoss, Prime, Rloo, token_weights
from roll.algorithms.implicit.rewards import implicit_rewards
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.algorithm import Aggregation, PrimeConfig, RlooConfig
from roll.core.batches import RolloutBatch
from tests.unit.advantages.test_advantage_families import samples


def by_loops(
    outcomes: list[float],
    implicit: list[list[float]],
    groups: list[int],
    gamma: float,
    coef: float,
) -> list[list[float]]:
    """Equation 5 of the paper, one token at a time."""
    found = []
    for i, own in enumerate(implicit):
        others = [j for j, group in enumerate(groups) if group == groups[i] and j != i]
        with_tokens = [j for j in others if implicit[j]]
        outcome = outcomes[i] - np.mean([outcomes[j] for j in others]) if others else 0.0
        row = []
        for t in range(len(own)):
            process = 0.0
            if with_tokens:
                baseline = np.mean([np.mean(implicit[j]) for j in with_tokens])
                for s in range(t, len(own)):
                    process += gamma ** (s - t) * (own[s] - baseline)
            row.append(float(outcome + coef * process))
        found.append(row)
    return found


ROWS = st.lists(
    st.tuples(
        st.integers(0, 2),  # group
        st.sampled_from([0.0, 0.5, 1.0]),  # outcome
        st.lists(st.floats(-2, 2, width=32), min_size=0, max_size=5),  # implicit rewards
    ),
    min_size=1,
    max_size=7,
)


@given(rows=ROWS, gamma=st.sampled_from([1.0, 0.9, 0.5]), coef=st.sampled_from([1.0, 0.3]))
@settings(max_examples=80, deadline=None)
def test_advantages_are_those_of_the_papers_equation(
    rows: list[tuple[int, float, list[float]]], gamma: float, coef: float
) -> None:
    groups, outcomes = [row[0] for row in rows], [row[1] for row in rows]
    implicit, width = [row[2] for row in rows], max(1, *(len(row[2]) for row in rows), 1)
    batch = samples(outcomes, groups, [width] * len(rows))
    lengths = torch.tensor([len(row) for row in implicit])
    given_BT = torch.full((len(rows), width), math.nan)
    for i, row in enumerate(implicit):
        given_BT[i, : len(row)] = torch.tensor(row)
    batch = replace(
        batch, loss_mask=torch.arange(width) < lengths[:, None], implicit_rewards=given_BT
    )
    found_BT = Prime(PrimeConfig(gamma=gamma, process_coef=coef))(batch).advantages_BT
    want = by_loops(outcomes, implicit, groups, gamma, coef)
    for i, row in enumerate(want):
        assert found_BT[i, : len(row)].tolist() == pytest.approx(row, abs=1e-5)
        assert not found_BT[i, len(row) :].any()


def test_a_model_that_is_still_the_reference_leaves_the_advantage_of_rloo() -> None:
    batch = samples([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 1], [3, 1, 2, 2])
    zeros_BT = torch.zeros(batch.tokens.shape)
    found = Prime(PrimeConfig())(replace(batch, implicit_rewards=zeros_BT))
    assert torch.equal(found.advantages_BT, Rloo(RlooConfig())(batch).advantages_BT)


def test_the_text_between_two_turns_neither_discounts_nor_has_a_reward() -> None:
    """The mask has a gap: 0.5 * 2 = 1 is what the last token adds to the first."""
    batch = samples([0.0, 0.0], [0, 0], [3, 3])
    mask_BT = torch.tensor([[True, False, True], [True, False, True]])
    given_BT = torch.tensor([[1.0, math.nan, 2.0], [0.0, math.nan, 0.0]])
    batch = replace(batch, loss_mask=mask_BT, implicit_rewards=given_BT)
    found_BT = Prime(PrimeConfig(gamma=0.5))(batch).advantages_BT
    assert found_BT.tolist()[0] == [2.0, 0.0, 2.0]
    assert found_BT.tolist()[1] == [-2.25, 0.0, -1.5]


def test_a_reward_is_the_scaled_log_ratio_and_junk_stays_out() -> None:
    logprobs_BT = torch.tensor([[0.0, -1.0, -2.0]])
    ref_BT = torch.tensor([[math.nan, -3.0, -1.0]])
    mask_BT = torch.tensor([[False, True, True]])
    found_BT = implicit_rewards(logprobs_BT, ref_BT, mask_BT, beta=0.05)
    assert found_BT.dtype == torch.float32
    assert found_BT[0].tolist() == pytest.approx([0.0, 0.1, -0.05])


def scored(seed: int = 0) -> tuple[RolloutBatch, torch.Tensor]:
    """A batch of successes and failures, and log-probs of the model that learns."""
    g = torch.Generator().manual_seed(seed)
    batch = samples([1.0, 0.0, 0.4, 0.9], [0, 0, 1, 1], [3, 1, 4, 2])
    ref_BT = -3 * torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64)
    found_BT = ref_BT + torch.randn(batch.tokens.shape, generator=g, dtype=torch.float64)
    weights_BT = token_weights(batch.loss_mask, Aggregation.SEQUENCE_MEAN)
    return replace(batch, ref_logprobs=ref_BT, token_weights=weights_BT), found_BT


def test_the_loss_is_the_mean_cross_entropy_over_responses_and_so_is_its_gradient() -> None:
    batch, logprobs_BT = scored()
    assert batch.ref_logprobs is not None
    assert batch.token_weights is not None
    beta = 0.7
    logprobs_BT.requires_grad_()
    result = OutcomeLoss(beta, threshold=0.5)(PolicyTerms(logprobs_BT), batch)
    total = (result.loss_BT * batch.token_weights).sum()
    total.backward()
    ratio_BT = (logprobs_BT.detach() - batch.ref_logprobs).numpy() * batch.loss_mask.numpy()
    sums, success = beta * ratio_BT.sum(1), np.array([1.0, 0.0, 0.0, 1.0])
    chance = 1 / (1 + np.exp(-sums))
    want = -(success * np.log(chance) + (1 - success) * np.log(1 - chance))
    assert total.item() == pytest.approx(want.mean(), rel=1e-6)
    gradient_BT = beta * (chance - success)[:, None] * batch.loss_mask.numpy() / 4
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.numpy() == pytest.approx(gradient_BT, abs=1e-6)
    assert result.metrics_B["reward"].numpy() == pytest.approx(sums)
    assert result.metrics_B["success"].tolist() == success.tolist()
    right = ((sums > 0) == (success > 0)).tolist()
    assert result.metrics_B["accuracy"].tolist() == right


def test_a_model_that_is_still_the_reference_knows_nothing() -> None:
    batch, _ = scored()
    assert batch.ref_logprobs is not None
    result = OutcomeLoss(0.05, threshold=0.5)(PolicyTerms(batch.ref_logprobs), batch)
    assert result.loss_BT[batch.loss_mask].tolist() == pytest.approx([math.log(2)] * 10)
    assert result.metrics_B["accuracy"].tolist() == [0.5] * 4


def test_a_loss_without_a_reference_is_an_error() -> None:
    batch, logprobs_BT = scored()
    with pytest.raises(ValueError, match="ref_logprobs"):
        OutcomeLoss(0.05, 0.5)(PolicyTerms(logprobs_BT), replace(batch, ref_logprobs=None))


def test_rewards_of_turns_count_for_success() -> None:
    batch, logprobs_BT = scored()
    assert batch.rewards is not None
    by_turns = replace(batch, rewards=0 * batch.rewards, turn_rewards=batch.rewards)
    result = OutcomeLoss(0.05, threshold=0.5)(PolicyTerms(logprobs_BT), by_turns)
    assert result.metrics_B["success"].tolist() == [1.0, 0.0, 0.0, 1.0]
