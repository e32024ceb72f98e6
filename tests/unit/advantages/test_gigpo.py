"""GiGPO on a batch of episodes, against loops over turns."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.turns.gigpo import Gigpo
from roll.config.algorithm.advantages import GigpoConfig
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.types import Prompt, Sample, Turn
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.types import Group, ScoredSample

EPS = 1e-6
Episode = list[tuple[float, str]]


def group_of(number: int, episodes: list[Episode], extra: float = 0.0) -> Group:
    """Episodes with turns of two tokens, each followed by one token of the environment."""
    prompt = Prompt(f"p:{number}", (1,) * (number + 1), "", "", "")
    samples = []
    for i, episode in enumerate(episodes):
        versions = [v for _ in episode for v in (0, 0, NOBODY)]
        completion = Completion.of(
            range(len(versions)), [0.0] * len(versions), versions, FinishReason.STOP
        )
        turns = tuple(
            Turn(3 * j, 3 * j + 2, reward, state) for j, (reward, state) in enumerate(episode)
        )
        reward = sum(reward for reward, _ in episode) + extra
        sample = Sample(f"{number}/{i}", str(number), prompt, completion, "")
        samples.append(ScoredSample(sample, reward, turns=turns))
    return Group(prompt, tuple(samples), 0)


def normalised(values: list[float], one: float) -> float:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return (one - statistics.fmean(values)) / (spread + EPS)


def by_loops(groups: list[list[Episode]], gamma: float, coef: float) -> list[list[float]]:
    """Advantage of each turn of each episode."""
    found = []
    for episodes in groups:
        totals = [sum(r for r, _ in episode) for episode in episodes]
        returns = [
            [
                sum(gamma ** (k - j) * episode[k][0] for k in range(j, len(episode)))
                for j in range(len(episode))
            ]
            for episode in episodes
        ]
        for i, episode in enumerate(episodes):
            turns = []
            for j, (_, state) in enumerate(episode):
                peers = [
                    returns[a][b]
                    for a, other in enumerate(episodes)
                    for b, (_, name) in enumerate(other)
                    if name == state and state
                ] or [returns[i][j]]
                turns.append(
                    normalised(totals, totals[i]) + coef * normalised(peers, returns[i][j])
                )
            found.append(turns)
    return found


EPISODE = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, -1.0]), st.sampled_from(["a", "b", ""])),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(
    st.lists(st.lists(EPISODE, min_size=2, max_size=4), min_size=1, max_size=3),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([0.0, 1.0, 2.0]),
)
def test_each_token_of_a_turn_gets_the_advantage_of_its_turn(
    groups: list[list[Episode]], gamma: float, coef: float
) -> None:
    batch = dense(assemble([group_of(i, episodes) for i, episodes in enumerate(groups)]))
    found_BT = Gigpo(GigpoConfig(gamma=gamma, step_coef=coef))(batch).advantages_BT
    expected = by_loops(groups, gamma, coef)
    assert not found_BT[~batch.loss_mask].any()
    for row, turns in enumerate(expected):
        own = found_BT[row][batch.loss_mask[row]].tolist()
        assert own == pytest.approx([a for a in turns for _ in range(2)], abs=1e-4)


def test_what_the_run_rewards_beyond_the_environment_belongs_to_the_last_turn() -> None:
    episodes: list[Episode] = [[(0.0, "a"), (1.0, "b")], [(0.0, "a"), (0.0, "b")]]
    plain = dense(assemble([group_of(0, episodes)]))
    more = replace(plain, rewards=plain.rewards + torch.tensor([0.0, 1.0]))  # type: ignore[operator]
    paid: list[Episode] = [[(0.0, "a"), (1.0, "b")], [(0.0, "a"), (1.0, "b")]]
    found_BT = Gigpo(GigpoConfig())(more).advantages_BT
    expected = by_loops([paid], 0.95, 1.0)
    assert found_BT[0][plain.loss_mask[0]].tolist()[::2] == pytest.approx(expected[0], abs=1e-4)


def test_a_batch_without_episodes_is_refused() -> None:
    batch = replace(dense(assemble([group_of(0, [[(1.0, "a")]])])), turns=None)
    with pytest.raises(ValueError, match="gigpo compares turns of episodes"):
        Gigpo(GigpoConfig())(batch)
