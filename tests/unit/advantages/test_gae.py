"""GAE against a loop over time, hand-worked numbers and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.algorithms import Gae, build_advantage
from roll.algorithms.advantages.gae import POSITIONS, length_adaptive_lambda
from roll.config.algorithm import AlgorithmConfig, GaeConfig, Need
from roll.core.batches import RolloutBatch

NAN = float("nan")


def step_batch(
    mask: list[list[int]],
    values: list[list[float]],
    rewards: list[float],
    token_rewards: list[list[float]] | None = None,
) -> RolloutBatch:
    rows = len(mask)
    return RolloutBatch(
        tokens=torch.zeros(rows, len(mask[0]), dtype=torch.int64),
        lengths=torch.full((rows,), len(mask[0])),
        sample_ids=[f"0/{i}/0" for i in range(rows)],
        tags=["x"] * rows,
        group_ids=torch.arange(rows),
        loss_mask=torch.tensor(mask).bool(),
        rewards=torch.tensor(rewards),
        values=torch.tensor(values),
        token_rewards=None if token_rewards is None else torch.tensor(token_rewards),
    )


def gae_by_a_loop(
    batch: RolloutBatch, *, gamma: float, lambdas: list[float]
) -> tuple[list[list[float]], list[list[float]]]:
    """The recursion of the paper, backwards over the trained tokens of each row."""
    assert batch.values is not None
    assert batch.rewards is not None
    advantages, returns = [], []
    for row, mask_T in enumerate(batch.loss_mask.tolist()):
        advantages.append([0.0] * len(mask_T))
        returns.append([0.0] * len(mask_T))
        value_after, advantage_after = 0.0, 0.0
        reward = batch.rewards[row].item()
        for t in reversed(range(len(mask_T))):
            if not mask_T[t]:
                continue
            value = batch.values[row, t].item()
            if batch.token_rewards is not None:
                reward += batch.token_rewards[row, t].item()
            delta = reward + gamma * value_after - value
            advantage_after = delta + gamma * lambdas[row] * advantage_after
            value_after, reward = value, 0.0
            advantages[row][t] = advantage_after
            returns[row][t] = advantage_after + value
    return advantages, returns


def random_batch(
    seed: int, *, rows: int, width: int, paid: bool, junk: float = NAN
) -> RolloutBatch:
    """Any mask, rows without trained tokens included; junk outside of it. With an even seed each
    row is one answer without a gap, as most batches are, with an odd one it has turns."""
    g = torch.Generator().manual_seed(seed)
    ends_B2 = torch.randint(0, width + 1, (rows, 2), generator=g).sort(1).values
    at_T = torch.arange(width)
    mask_BT = (at_T >= ends_B2[:, :1]) & (at_T < ends_B2[:, 1:])
    if seed % 2:
        mask_BT = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    batch = step_batch(
        mask_BT.int().tolist(),
        (torch.randn(rows, width, generator=g) * 3).masked_fill(~mask_BT, junk).tolist(),
        torch.randn(rows, generator=g).tolist(),
    )
    if not paid:
        return batch
    token_rewards_BT = torch.randn(rows, width, generator=g).masked_fill(~mask_BT, junk)
    return replace(batch, token_rewards=token_rewards_BT)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    width=st.integers(1, 60),
    gamma=st.sampled_from([0.9, 0.999, 1.0]),
    policy_lambda=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    paid=st.booleans(),
)
@settings(max_examples=50)
def test_gae_matches_the_loop_whatever_stands_outside_the_mask(
    seed: int, rows: int, width: int, gamma: float, policy_lambda: float, paid: bool
) -> None:
    batch = random_batch(seed, rows=rows, width=width, paid=paid)
    found = Gae(GaeConfig(gamma=gamma, policy_lambda=policy_lambda))(batch)
    advantages, returns = gae_by_a_loop(batch, gamma=gamma, lambdas=[policy_lambda] * rows)
    assert found.advantages_BT.dtype == torch.float32
    assert found.returns_BT is not None
    for row in range(rows):
        expected = pytest.approx(advantages[row], rel=1e-6, abs=1e-6)
        assert found.advantages_BT[row].tolist() == expected
        assert found.returns_BT[row].tolist() == pytest.approx(returns[row], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize(("rows", "width"), [(3, 1024), (POSITIONS // 500 + 1, 500)])
def test_gae_of_long_rows_and_of_many_matches_the_loop(rows: int, width: int, seed: int) -> None:
    batch = random_batch(seed, rows=rows, width=width, paid=True, junk=float("inf"))
    found = Gae(GaeConfig(gamma=0.999, policy_lambda=0.97))(batch)
    expected = torch.tensor(gae_by_a_loop(batch, gamma=0.999, lambdas=[0.97] * rows)[0])
    torch.testing.assert_close(found.advantages_BT, expected, rtol=1e-6, atol=1e-6)


def test_gae_gives_the_hand_worked_numbers() -> None:
    """Two turns with an observation between them; gamma 0.5, lambda 0.5, reward 4:

    delta_2 = 4 - 2 = 2, delta_1 = 0.5 * 2 - 1 = 0, delta_0 = 0.5 * 1 - 3 = -2.5
    """
    batch = step_batch([[0, 1, 1, 0, 1, 0]], [[9, 3, 1, NAN, 2, NAN]], [4.0])
    found = Gae(GaeConfig(gamma=0.5, policy_lambda=0.5))(batch)
    assert found.returns_BT is not None
    assert found.advantages_BT.tolist() == [[0, -2.375, 0.5, 0, 2, 0]]
    assert found.returns_BT.tolist() == [[0, 0.625, 1.5, 0, 4, 0]]


def test_lambda_one_is_the_reward_minus_the_value_and_zero_the_difference_of_values() -> None:
    batch = step_batch([[1, 1, 1]], [[0.5, -1.0, 2.0]], [3.0])
    whole = Gae(GaeConfig(policy_lambda=1.0))(batch)
    assert whole.returns_BT is not None
    assert whole.advantages_BT.tolist() == [[2.5, 4, 1]]
    assert whole.returns_BT.tolist() == [[3, 3, 3]]
    assert Gae(GaeConfig(policy_lambda=0.0))(batch).advantages_BT.tolist() == [[-1.5, 3, 1]]


def test_token_rewards_are_paid_at_their_token() -> None:
    batch = step_batch([[1, 0, 1]], [[0.0, NAN, 0.0]], [1.0], [[0.25, NAN, 0.5]])
    found_BT = Gae(GaeConfig(gamma=0.5, policy_lambda=1.0))(batch).advantages_BT
    assert found_BT.tolist() == [[1.0, 0, 1.5]]


def test_the_lambda_of_vapo_grows_with_the_response() -> None:
    """At alpha = 0.05, 1 - 1 / (0.05 * 100) = 0.8; up to 20 tokens it is 0."""
    found_B = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 100, 2000]), 0.05)
    assert found_B.tolist() == pytest.approx([0, 0, 0, 0.5, 0.8, 0.99])


def test_an_adaptive_lambda_is_each_rows_own_and_the_critic_keeps_its_own() -> None:
    batch = random_batch(7, rows=5, width=120, paid=False)
    tokens = batch.loss_mask.sum(1).tolist()
    lambdas = [max(0.0, 1 - 1 / (0.05 * max(n, 1))) for n in tokens]
    assert len(set(lambdas)) > 2
    config = GaeConfig(gamma=0.99, policy_lambda=None, adaptive_alpha=0.05, critic_lambda=1.0)
    found = Gae(config)(batch)
    expected_BT = torch.tensor(gae_by_a_loop(batch, gamma=0.99, lambdas=lambdas)[0])
    returns_BT = torch.tensor(gae_by_a_loop(batch, gamma=0.99, lambdas=[1.0] * 5)[1])
    torch.testing.assert_close(found.advantages_BT, expected_BT, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.returns_BT, returns_BT, rtol=1e-6, atol=1e-6)


def test_without_a_lambda_of_its_own_the_critic_follows_the_policy() -> None:
    batch = random_batch(1, rows=3, width=30, paid=True)
    same = Gae(GaeConfig(policy_lambda=0.9, critic_lambda=0.9))(batch)
    left_out = Gae(GaeConfig(policy_lambda=0.9))(batch)
    torch.testing.assert_close(same.returns_BT, left_out.returns_BT)


def test_no_trained_token_at_all_gives_zeros() -> None:
    batch = step_batch([[0, 0], [0, 0]], [[NAN, NAN], [1.0, 2.0]], [1.0, NAN])
    found = Gae(GaeConfig())(batch)
    assert found.returns_BT is not None
    assert not found.advantages_BT.any()
    assert not found.returns_BT.any()


def test_the_config_builds_gae_and_asks_for_a_critic() -> None:
    config = AlgorithmConfig(
        advantage=GaeConfig(policy_lambda=None, adaptive_alpha=0.05, critic_lambda=1.0)
    )
    assert config.needs[Need.CRITIC] == ["gae"]
    assert build_advantage(config) == Gae(
        GaeConfig(policy_lambda=None, adaptive_alpha=0.05, critic_lambda=1.0)
    )


def test_two_lambdas_for_the_policy_or_none_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"takes the place of policy_lambda, which is 0\.95"):
        GaeConfig(adaptive_alpha=0.05)
    with pytest.raises(ValidationError, match="set policy_lambda or adaptive_alpha"):
        GaeConfig(policy_lambda=None)


def test_a_batch_without_values_names_the_step_that_makes_them() -> None:
    batch = replace(step_batch([[1]], [[0.0]], [1.0]), values=None)
    with pytest.raises(ValueError, match="values is not set; run add_values"):
        Gae(GaeConfig())(batch)
