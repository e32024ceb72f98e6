"""GAE over turns, against loops over turns and tokens, and against GAE over tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.gae import Gae
from roll.algorithms.advantages.turns.turn_gae import TurnGae
from roll.config.algorithm.advantages import GaeConfig, TurnGaeConfig
from roll.core.batches import RolloutBatch
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from tests.unit.advantages.test_gigpo import group_of

EPISODES = [[0.0, 1.0, -0.5], [2.0], [0.25, 0.5]]
"""Rewards of the turns; a turn has two tokens."""
GAMMA, TURN_LAMBDA = 0.9, 0.8


def batch_of(episodes: list[list[float]], extra: float = 0.0, seed: int = 0) -> RolloutBatch:
    """Episodes with these rewards, and random values."""
    made = [[(reward, "") for reward in episode] for episode in episodes]
    batch = dense(assemble([group_of(1, made, extra)]))
    dice = torch.Generator().manual_seed(seed)
    values_BT = torch.rand(batch.loss_mask.shape, generator=dice)
    return replace(batch, values=values_BT.masked_fill(~batch.loss_mask, torch.nan))


def by_loops(
    batch: RolloutBatch, episodes: list[list[float]], token_lambda: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, token by token from the end."""
    assert batch.values is not None
    assert batch.turns is not None
    advantages_BT, returns_BT = (torch.zeros(batch.loss_mask.shape) for _ in range(2))
    for row, rewards in enumerate(episodes):
        next_value, next_advantage = 0.0, 0.0
        for turn, reward in zip(reversed(batch.turns[row]), reversed(rewards), strict=True):
            value = float(batch.values[row, turn.begin])
            delta = reward + GAMMA * next_value - value
            whole = delta + GAMMA * TURN_LAMBDA * next_advantage
            after, advantage = reward + GAMMA * (next_value + TURN_LAMBDA * next_advantage), 0.0
            for place in reversed(range(turn.begin, turn.end)):
                here = float(batch.values[row, place])
                advantage = after - here + (token_lambda or 0.0) * advantage
                after = here
                found = whole if token_lambda is None else advantage
                advantages_BT[row, place] = found
                returns_BT[row, place] = found + (value if token_lambda is None else here)
            next_value, next_advantage = value, whole
    return advantages_BT, returns_BT


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=1, max_size=5), min_size=1),
    st.sampled_from([None, 0.0, 0.7, 1.0]),
    st.integers(0, 100),
)
def test_it_equals_loops_over_turns_and_tokens(
    episodes: list[list[float]], token_lambda: float | None, seed: int
) -> None:
    batch = batch_of(episodes, seed=seed)
    config = TurnGaeConfig(gamma=GAMMA, turn_lambda=TURN_LAMBDA, token_lambda=token_lambda)
    found = TurnGae(config)(batch)
    advantages_BT, returns_BT = by_loops(batch, episodes, token_lambda)
    torch.testing.assert_close(found.advantages_BT, advantages_BT, rtol=0, atol=1e-5)
    assert found.returns_BT is not None
    torch.testing.assert_close(found.returns_BT, returns_BT, rtol=0, atol=1e-5)


def test_how_tokens_divide_a_turn_does_not_change_what_the_turn_before_is_worth() -> None:
    """By hand: the second turn is 1 better than its value 0, so the first is worth 1, too."""
    batch = batch_of([[0.0, 1.0]])
    assert batch.values is not None
    assert batch.turns is not None
    first, second = batch.turns[0]
    batch.values[0, [first.begin, first.begin + 1, second.begin]] = 0.0
    batch.values[0, second.begin + 1] = 0.5
    found = TurnGae(TurnGaeConfig(gamma=1.0, turn_lambda=1.0, token_lambda=0.0))(batch)
    assert found.advantages_BT[0, first.begin : first.end].tolist() == [0.0, 1.0]
    assert found.advantages_BT[0, second.begin : second.end].tolist() == [0.5, 0.5]


def test_without_discounts_and_lambdas_it_is_gae_over_tokens() -> None:
    batch = batch_of([[0.0, 0.0, 0.0], [0.0]], extra=1.0)
    turns = TurnGae(TurnGaeConfig(gamma=1.0, turn_lambda=1.0, token_lambda=1.0))(batch)
    tokens = Gae(GaeConfig(gamma=1.0, policy_lambda=1.0))(batch)
    torch.testing.assert_close(turns.advantages_BT, tokens.advantages_BT, rtol=0, atol=1e-6)
    assert turns.returns_BT is not None
    assert tokens.returns_BT is not None
    torch.testing.assert_close(turns.returns_BT, tokens.returns_BT, rtol=0, atol=1e-6)


def test_the_rewards_of_the_run_belong_to_the_last_turn() -> None:
    plain, more = batch_of(EPISODES), batch_of(EPISODES, extra=1.0)
    estimator = TurnGae(TurnGaeConfig(gamma=1.0, turn_lambda=0.0))
    change_BT = estimator(more).advantages_BT - estimator(plain).advantages_BT
    assert plain.turns is not None
    for row, turns in enumerate(plain.turns):
        for turn in turns:
            expected = 1.0 if turn is turns[-1] else 0.0
            assert change_BT[row, turn.begin : turn.end].tolist() == pytest.approx([expected] * 2)


def test_tokens_that_are_not_trained_are_no_part_of_a_turn() -> None:
    batch = batch_of(EPISODES)
    assert batch.turns is not None
    first = batch.turns[0][0].begin
    batch.loss_mask[0, first] = False
    assert batch.values is not None
    batch.values[0, first] = torch.nan
    found = TurnGae(TurnGaeConfig(token_lambda=0.5))(batch)
    assert torch.isfinite(found.advantages_BT).all()
    assert found.advantages_BT[0, first] == 0


def test_samples_without_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="turn_gae compares turns of episodes"):
        TurnGae(TurnGaeConfig())(replace(batch_of(EPISODES), turns=None))
