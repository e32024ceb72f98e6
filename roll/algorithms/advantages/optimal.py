"""Advantages with the baseline that has the least variance: of samples (OPO), or of tokens (OTB).

OPO, arXiv 2505.23585, takes the length of a sample for the squared norm of its gradient. OTB, arXiv
2602.07078, has a baseline for each token. The norm of the gradient of a token's log-prob by all
weights of the model would need a backward pass for each token. In its place stands the norm of the
gradient by the logits: with the probabilities q of the vocabulary and p of the token, it is
|onehot - q|**2 = 1 - 2 * p + sum(q**2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import rewards_to_go, total_rewards
from roll.algorithms.advantages.trained import TrainedTokens
from roll.algorithms.loss_interface import Estimate, SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import OpoConfig, OtbConfig
from roll.core.batches import RolloutBatch


def opo_advantages(rewards_B: Tensor, tokens_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return reward - sum(tokens * reward) / sum(tokens), sums over the group, float64 `[B]`.

    Args:
        rewards_B: any float dtype.
        tokens_B: number of trained tokens of each sample. In a group without trained tokens the
            result has no effect, because no token carries it.
        group_ids_B: any integers; samples of one prompt share an id.
    """
    siblings = Siblings.of(group_ids_B)
    weighted_B = siblings.sum(tokens_B * rewards_B.double())
    return rewards_B - weighted_B / siblings.sum(tokens_B).clamp(min=1)


@ADVANTAGES.register(OpoConfig)
@dataclass(frozen=True)
class Opo(SampleEstimator):
    """OPO advantage, the same on every trained token of a sample; 0 for a group of one."""

    config: OpoConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample's total reward, float64 `[B]`; ValueError without
        rewards."""
        return opo_advantages(total_rewards(samples), samples.trained_tokens(), samples.group_ids)


@ADVANTAGES.register(OtbConfig)
@dataclass(frozen=True)
class Otb:
    """Advantage of OTB: the sum of the rewards from token t on, minus their mean over the siblings
    that have a t-th trained token, weighted by their energy up to there."""

    config: OtbConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages.

        Raises:
            ValueError: rewards, the policy's log-probs or its squared probabilities are missing.
        """
        rewards_B = batch.require("rewards", made_by="assemble")
        probs_BT = batch.require("old_logprobs", made_by="add_logprobs").double().exp()
        squares_BT = batch.require("squared_probs", made_by="add_logprobs").double()
        tokens = TrainedTokens.counted(batch.loss_mask)
        # Rounding can make the energy of a certain token negative.
        energy_BL = tokens.pack((1 - 2 * probs_BT + squares_BT).clamp(min=0)).cumsum(1)
        weights_BL = (energy_BL + self.config.eps) * tokens.pack(batch.loss_mask)
        returns_BL = tokens.pack(rewards_to_go(rewards_B, batch, gamma=1.0))
        siblings = Siblings.of(batch.group_ids)
        total_BL = siblings.sum(weights_BL).clamp(min=self.config.eps)
        baseline_BL = siblings.sum(weights_BL * returns_BL) / total_BL
        return Estimate(tokens.unpack(returns_BL - baseline_BL).float())
