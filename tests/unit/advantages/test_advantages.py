"""Advantages against published golden values and against loops."""

from __future__ import annotations

import statistics
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import build_advantage
from roll.algorithms.advantages.group import StdKind, group_advantages
from roll.config.algorithm import AlgorithmConfig, GrpoConfig, ReinforceConfig
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch

GOLDEN = [  # rewards, with the group's std, without; computed by verl 0.9.1
    ([1, 0, 0, 1], [0.866, -0.866, -0.866, 0.866], [0.5, -0.5, -0.5, 0.5]),
    ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25]),
    ([1, 0], [0.7071, -0.7071], [0.5, -0.5]),
    ([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),
    ([0.2, 0.5, 0.9, 1], [-1.2173, -0.4058, 0.6763, 0.9468], [-0.45, -0.15, 0.25, 0.35]),
]


@pytest.mark.parametrize(("rewards", "with_std", "without_std"), GOLDEN)
def test_one_group_gives_the_golden_values(
    rewards: list[float], with_std: list[float], without_std: list[float]
) -> None:
    group = torch.zeros(len(rewards), dtype=torch.int64)
    cases: list[tuple[StdKind, list[float]]] = [("group", with_std), ("none", without_std)]
    for std, expected in cases:
        found = group_advantages(torch.tensor(rewards).double(), group, std=std, eps=1e-6)
        assert found.tolist() == pytest.approx(expected, abs=6e-5)


def advantages_by_loops(rewards: list[float], groups: list[int], std: StdKind) -> list[float]:
    def spread(values: list[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    found = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        divisor = {"group": spread(siblings) + 1e-6, "batch": spread(rewards) + 1e-6, "none": 1.0}
        found.append((reward - statistics.fmean(siblings)) / divisor[std])
    return found


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 1.0, -2.0]), st.integers(-2, 3)),
        min_size=1,
        max_size=12,
    ),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=80)
def test_groups_in_any_row_order_match_the_loops(
    std: StdKind, rows: list[tuple[float, int]], random: Random
) -> None:
    random.shuffle(rows)
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    found = group_advantages(torch.tensor(rewards), torch.tensor(groups), std=std, eps=1e-6)
    assert found.tolist() == pytest.approx(advantages_by_loops(rewards, groups, std), abs=1e-9)


def test_equal_rewards_that_binary_fractions_cannot_hold_give_exactly_zero() -> None:
    rewards_B = torch.full((7,), 0.1)
    assert (group_advantages(rewards_B, torch.zeros(7), std="group", eps=1e-6) == 0).all()


def test_a_lone_sample_has_nothing_to_be_compared_with() -> None:
    found = group_advantages(torch.tensor([0.7]), torch.tensor([3]), std="group", eps=1e-6)
    assert found.tolist() == [0]


@pytest.mark.parametrize("advantage", [GrpoConfig(), ReinforceConfig(gamma=0.9)])
def test_advantages_are_zero_outside_the_loss_mask(
    advantage: GrpoConfig | ReinforceConfig,
) -> None:
    batch = rollout_batch()
    found_BT = build_advantage(AlgorithmConfig(advantage=advantage))(batch).advantages_BT
    assert found_BT.dtype == torch.float32
    assert found_BT.shape == batch.tokens.shape
    assert (found_BT[~batch.loss_mask] == 0).all()
    assert (found_BT[batch.loss_mask] != 0).all()


def test_grpo_puts_one_number_on_all_tokens_of_a_sample() -> None:
    batch = rollout_batch()
    found_BT = build_advantage(AlgorithmConfig())(batch).advantages_BT
    assert batch.rewards is not None
    expected = advantages_by_loops(batch.rewards.tolist(), batch.group_ids.tolist(), "group")
    for row_T, mask_T, value in zip(found_BT, batch.loss_mask, expected, strict=True):
        torch.testing.assert_close(row_T[mask_T], torch.full((int(mask_T.sum()),), value))


def two_turns(rewards_B: Tensor) -> RolloutBatch:
    """Two trained tokens, two of the environment, one trained token; and one trained token."""
    mask_BT = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]).bool()
    return RolloutBatch(
        tokens=torch.zeros(2, 6, dtype=torch.int64),
        lengths=torch.tensor([6, 3]),
        sample_ids=["0/a/0", "0/b/0"],
        tags=["x", "x"],
        group_ids=torch.tensor([0, 1]),
        loss_mask=mask_BT,
        rewards=rewards_B,
    )


def test_reinforce_discounts_back_from_the_last_trained_token() -> None:
    config = AlgorithmConfig(advantage=ReinforceConfig(gamma=0.5))
    found_BT = build_advantage(config)(two_turns(torch.tensor([1.0, -2.0]))).advantages_BT
    assert found_BT.tolist() == [[0, 0.25, 0.5, 0, 0, 1], [0, 0, -2, 0, 0, 0]]


def test_the_batch_baseline_is_the_mean_reward() -> None:
    config = AlgorithmConfig(advantage=ReinforceConfig(baseline="batch"))
    found_BT = build_advantage(config)(two_turns(torch.tensor([1.0, -2.0]))).advantages_BT
    assert found_BT.tolist() == [[0, 1.5, 1.5, 0, 0, 1.5], [0, 0, -1.5, 0, 0, 0]]


def test_an_advantage_without_rewards_names_the_step_that_makes_them() -> None:
    batch = replace(rollout_batch(), rewards=None)
    with pytest.raises(ValueError, match="rewards is not set; run assemble"):
        build_advantage(AlgorithmConfig())(batch)
