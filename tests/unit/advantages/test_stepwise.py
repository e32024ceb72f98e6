"""Step-level returns and GiGPO against loops over episodes."""

from __future__ import annotations

import statistics
from random import Random
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.turns.stepwise import gigpo_advantages, step_returns


def test_returns_follow_the_order_of_the_steps_and_not_of_the_rows() -> None:
    """Episode 7: rewards 1, 2, 4 at positions 0, 1, 5; episode 3: 10 alone."""
    found_S = step_returns(
        torch.tensor([4.0, 10.0, 1.0, 2.0]),
        torch.tensor([7, 3, 7, 7]),
        torch.tensor([5, 0, 0, 1]),
        gamma=0.5,
    )
    assert found_S.tolist() == [4, 10, 3, 4]


@given(
    episodes=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=9), min_size=1, max_size=4
    ),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_returns_match_the_recursion(
    episodes: list[list[float]], gamma: float, random: Random
) -> None:
    rows: list[tuple[float, int, int, float]] = []
    for episode, rewards in enumerate(episodes):
        later = 0.0
        for position in reversed(range(len(rewards))):
            later = rewards[position] + gamma * later
            rows.append((rewards[position], episode, position, later))
    random.shuffle(rows)
    rewards_S, episodes_S, positions_S, expected = zip(*rows, strict=True)
    found_S = step_returns(
        torch.tensor(rewards_S), torch.tensor(episodes_S), torch.tensor(positions_S), gamma=gamma
    )
    assert found_S.tolist() == pytest.approx(list(expected), abs=1e-5)


def test_two_steps_at_one_position_are_refused() -> None:
    with pytest.raises(ValueError, match="same position"):
        step_returns(torch.ones(2), torch.tensor([1, 1]), torch.tensor([0, 0]), gamma=1.0)


def gigpo_by_loops(
    rewards: list[float],
    groups: list[int],
    steps: list[tuple[float, int, int]],
    *,
    coef: float,
    std: Literal["group", "none"],
) -> list[float]:
    def relative(value: float, peers: list[float]) -> float:
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        return (value - statistics.fmean(peers)) / (spread + 1e-6 if std == "group" else 1.0)

    found = []
    for value, episode, anchor in steps:
        group = groups[episode]
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        same_state = [v for v, e, a in steps if (groups[e], a) == (group, anchor)]
        found.append(relative(rewards[episode], peers) + coef * relative(value, same_state))
    return found


@pytest.mark.parametrize("std", ["group", "none"])
@given(
    episodes=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 0.3]), st.integers(-1, 1)), min_size=1, max_size=6
    ),
    data=st.data(),
)
@settings(max_examples=50)
def test_gigpo_matches_the_loops(
    std: Literal["group", "none"], episodes: list[tuple[float, int]], data: st.DataObject
) -> None:
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.5, 2.0]),
                st.integers(0, len(episodes) - 1),
                st.integers(-2, 2),
            ),
            min_size=1,
            max_size=15,
        )
    )
    rewards, groups = [r for r, _ in episodes], [g for _, g in episodes]
    found_S = gigpo_advantages(
        episode_rewards_E=torch.tensor(rewards),
        groups_E=torch.tensor(groups),
        returns_S=torch.tensor([v for v, _, _ in steps]),
        episodes_S=torch.tensor([e for _, e, _ in steps]),
        anchors_S=torch.tensor([a for _, _, a in steps]),
        step_coef=0.7,
        std=std,
    )
    expected = gigpo_by_loops(rewards, groups, steps, coef=0.7, std=std)
    assert found_S.tolist() == pytest.approx(expected, abs=1e-5)


def test_equal_anchors_of_different_groups_are_different_states() -> None:
    found_S = gigpo_advantages(
        episode_rewards_E=torch.tensor([1.0, 1.0]),
        groups_E=torch.tensor([0, 1]),
        returns_S=torch.tensor([1.0, 0.0]),
        episodes_S=torch.tensor([0, 1]),
        anchors_S=torch.tensor([9, 9]),
        std="none",
    )
    assert found_S.tolist() == [0, 0]


def test_a_long_episode_counts_once_in_the_mean_of_its_group() -> None:
    """Rewards 1 (three steps) and 0 (one step): the mean is 0.5, not 0.75."""
    found_S = gigpo_advantages(
        episode_rewards_E=torch.tensor([1.0, 0.0]),
        groups_E=torch.tensor([0, 0]),
        returns_S=torch.zeros(4),
        episodes_S=torch.tensor([0, 0, 0, 1]),
        anchors_S=torch.arange(4),
        std="none",
    )
    assert found_S.tolist() == [0.5, 0.5, 0.5, -0.5]
