"""Advantages per turn of an episode: of the episode, and of the turn among those that began in the
same state (GiGPO, arXiv 2505.10978)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.advantages.turns.rewards import rewards_of_turns
from roll.algorithms.advantages.turns.stepwise import gigpo_advantages, step_returns
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import GigpoConfig
from roll.core.batches import RolloutBatch
from roll.core.types import Turn


@ADVANTAGES.register(GigpoConfig)
@dataclass(frozen=True)
class Gigpo:
    """GiGPO advantage, the same on all trained tokens of a turn; see `rewards_of_turns`."""

    config: GigpoConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages.

        Raises:
            ValueError: the batch has no rewards, or its samples are no episodes.
        """
        config, rewards_B = self.config, total_rewards(batch)
        if batch.turns is None:
            raise ValueError("gigpo compares turns of episodes, and these samples have none")
        turns = [(row, turn) for row, own in enumerate(batch.turns) for turn in own]
        if not turns:
            return Estimate(torch.zeros_like(batch.loss_mask, dtype=torch.float32))
        episodes_S = torch.tensor([row for row, _ in turns])
        rewards = [each for own in rewards_of_turns(batch.turns, rewards_B) for each in own]
        returns_S = step_returns(
            torch.tensor(rewards, dtype=torch.float64),
            episodes_S,
            torch.tensor([number for own in batch.turns for number in range(len(own))]),
            gamma=config.gamma,
        )
        advantages_S = gigpo_advantages(
            episode_rewards_E=rewards_B,
            groups_E=batch.group_ids,
            returns_S=returns_S,
            episodes_S=episodes_S,
            anchors_S=_anchors([turn for _, turn in turns]),
            step_coef=config.step_coef,
            std=config.std,
            eps=config.eps,
        )
        advantages_BT = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
        for (row, turn), advantage in zip(turns, advantages_S.tolist(), strict=True):
            advantages_BT[row, turn.begin : turn.end] = advantage
        return Estimate(advantages_BT.masked_fill(~batch.loss_mask, 0))


def _anchors(turns: list[Turn]) -> Tensor:
    """Return a number for the state of each turn, int64 `[S]`. Equal states have equal numbers,
    also in turns of different prompts; a turn without a state has a number of its own."""
    numbers: dict[str, int] = {}
    anchors = []
    for place, turn in enumerate(turns):
        if turn.state:
            anchors.append(numbers.setdefault(turn.state, -1 - len(numbers)))
        else:
            anchors.append(place)
    return torch.tensor(anchors)
