"""Returns and advantages of the steps of episodes.

Axis letters: S steps, E episodes. Rows may be in any order. A step is a turn of the policy;
`gigpo.py` takes turns out of a batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.group import group_advantages


def step_returns(
    rewards_S: Tensor, episodes_S: Tensor, positions_S: Tensor, *, gamma: float
) -> Tensor:
    """Return the discounted sum of the rewards from each step to its episode's end, float64 `[S]`.

    A reward is multiplied by gamma ** distance, where distance is 0 for the step itself.

    Args:
        rewards_S: reward of each step; at least one step.
        episodes_S: integers; steps of one episode share an id.
        positions_S: integers that give the order of the steps within an episode. Only the order
            matters: consecutive steps have distance 1, whatever their positions.
        gamma: discount per step.

    Raises:
        ValueError: two steps of an episode share a position.
    """
    by_position_S = torch.argsort(positions_S, stable=True)
    order_S = by_position_S[torch.argsort(episodes_S[by_position_S], stable=True)]
    _, row_S, size_E = torch.unique_consecutive(
        episodes_S[order_S], return_inverse=True, return_counts=True
    )
    sorted_S = positions_S[order_S]
    if ((row_S[1:] == row_S[:-1]) & (sorted_S[1:] == sorted_S[:-1])).any():
        raise ValueError("two steps of one episode have the same position; number them apart")
    column_S = torch.arange(len(order_S), device=row_S.device) - (size_E.cumsum(0) - size_E)[row_S]
    width = int(size_E.max())
    grid_EL = torch.zeros(len(size_E), width, dtype=torch.float64, device=row_S.device)
    grid_EL[row_S, column_S] = rewards_S[order_S].double()
    sums_EL = discounted_sums(grid_EL, torch.tensor([gamma], dtype=torch.float64))
    returns_S = torch.zeros_like(rewards_S, dtype=torch.float64)
    returns_S[order_S] = sums_EL[row_S, column_S]
    return returns_S


def gigpo_advantages(
    *,
    episode_rewards_E: Tensor,
    groups_E: Tensor,
    returns_S: Tensor,
    episodes_S: Tensor,
    anchors_S: Tensor,
    step_coef: float = 1.0,
    std: Literal["group", "none"] = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Return episode advantage + step_coef * step advantage, `[S]` (GiGPO, arXiv 2505.10978).

        episode  (reward - mean) / (std + eps) over the EPISODES of the group: a long episode does
                 not count more often than a short one
        step     (return - mean) / (std + eps) over the steps of the same group that began in the
                 same state; 0 if no other step began there

    Equal anchors in different groups denote different states, because the task is part of a state.

    Args:
        episode_rewards_E: total reward of each episode.
        groups_E: integers; episodes of the same task share an id.
        returns_S: discounted return from each step on, see `step_returns`.
        episodes_S: index of each step's episode on axis E, int64.
        anchors_S: integers; steps of a group that began in the same state share an id.
        step_coef: factor of the step advantage.
        std: `group` divides both advantages by their standard deviation, `none` does not.
        eps: number that is added to the standard deviations.

    Returns:
        Float64 `[S]`.
    """
    episode_E = group_advantages(episode_rewards_E, groups_E, std=std, eps=eps)
    states_S2 = torch.stack([groups_E[episodes_S], anchors_S], dim=1)
    _, state_S = torch.unique(states_S2, dim=0, return_inverse=True)
    step_S = group_advantages(returns_S, state_S, std=std, eps=eps)
    return episode_E[episodes_S] + step_coef * step_S
