"""Advantages with the reward of a greedy response as baseline (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import rewards_to_go
from roll.algorithms.loss_interface import Estimate, SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import RemaxConfig
from roll.core.batches import RolloutBatch


@ADVANTAGES.register(RemaxConfig)
@dataclass(frozen=True)
class Remax(SampleEstimator):
    """Advantage reward - reward of the greedy response, plus token rewards from the token on."""

    config: RemaxConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample without its token rewards; raise ValueError without
        rewards or `baseline_rewards`."""
        rewards_B = samples.require("rewards", made_by="assemble").double()
        greedy_B = samples.require("baseline_rewards", made_by="the greedy rollout").double()
        return rewards_B - greedy_B

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages; raise ValueError without rewards or `baseline_rewards`."""
        return Estimate(rewards_to_go(self.per_sample(batch), batch, gamma=1.0).float())
