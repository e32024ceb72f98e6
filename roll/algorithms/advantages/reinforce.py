"""Advantages as discounted rewards that follow a token, minus an optional baseline (REINFORCE)."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.advantages.rewards import rewards_to_go
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import ReinforceConfig
from roll.core.batches import RolloutBatch


@ADVANTAGES.register(ReinforceConfig)
@dataclass(frozen=True)
class Reinforce:
    """Advantage (reward - baseline) * discount, plus the discounted token rewards if there are any.

    The baseline is subtracted before the discount, so (reward - baseline) * discount has the same
    sign on all tokens of a sample. A token reward counts for its own token and for the trained
    tokens before it.
    """

    config: ReinforceConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages; raise ValueError if the batch has no rewards."""
        rewards_B = batch.require("rewards", made_by="assemble").double()
        if self.config.baseline == "batch":
            rewards_B = rewards_B - rewards_B.mean()
        return Estimate(rewards_to_go(rewards_B, batch, gamma=self.config.gamma).float())
