"""REINFORCE with a normalisation over all tokens of a step (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.advantages.rewards import rewards_to_go
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.moments import standardized
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import ReinforcePpConfig
from roll.core.batches import RolloutBatch


@ADVANTAGES.register(ReinforcePpConfig)
@dataclass(frozen=True)
class ReinforcePp:
    """Advantage (return - mean) / (std + eps), with mean and std over the trained tokens of a step.

    The return of token t is the discounted sum of the rewards from token t on. With
    `baseline="group"`, the mean reward of the group is subtracted from each reward first. This mean
    is that of `rewards` only; token rewards do not change.
    """

    config: ReinforcePpConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages; raise ValueError if the batch has no rewards."""
        rewards_B = batch.require("rewards", made_by="assemble").double()
        if self.config.baseline == "group":
            rewards_B = rewards_B - Siblings.of(batch.group_ids).mean(rewards_B)
        returns_BT = rewards_to_go(rewards_B, batch, gamma=self.config.gamma)
        return Estimate(standardized(returns_BT, batch.loss_mask, eps=self.config.eps).float())
