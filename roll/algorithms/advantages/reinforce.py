"""Advantages as discounted rewards that follow a token, minus an optional baseline (REINFORCE)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import rewards_to_go
from roll.algorithms.loss_interface import Estimate, SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import ReinforceConfig
from roll.core.batches import RolloutBatch


@ADVANTAGES.register(ReinforceConfig)
@dataclass(frozen=True)
class Reinforce(SampleEstimator):
    """Advantage (reward - baseline) * discount, plus the discounted token rewards if there are any.

    The baseline is subtracted before the discount, so (reward - baseline) * discount has the same
    sign on all tokens of a sample. A token reward counts for its own token and for the trained
    tokens before it.
    """

    config: ReinforceConfig

    @property
    def spreads(self) -> bool:
        """True without discount, so that all tokens of a sample have the same advantage."""
        return self.config.gamma == 1

    def per_sample(self, samples: Samples) -> Tensor:
        """Return reward - baseline of each sample."""
        rewards_B = samples.require("rewards", made_by="assemble").double()
        return rewards_B - rewards_B.mean() if self.config.baseline == "batch" else rewards_B

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages; raise ValueError if the batch has no rewards."""
        outcome_B = self.per_sample(batch)
        return Estimate(rewards_to_go(outcome_B, batch, gamma=self.config.gamma).float())
