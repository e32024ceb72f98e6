"""Advantages from outcomes and from the implicit rewards of tokens (PRIME, arXiv 2502.01456)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.group import Rloo
from roll.algorithms.advantages.trained import TrainedTokens
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import PrimeConfig, RlooConfig
from roll.core.batches import RolloutBatch


def process_advantages(
    rewards_BL: Tensor, count_B: Tensor, group_ids_B: Tensor, *, gamma: float
) -> Tensor:
    """Return for each token the discounted sum, from it on, of the rewards minus their baseline,
    float64 `[B, L]` (the process part of equation 5); 0 behind the last token of a row.

    The baseline of a sample is the mean, over its siblings that have tokens, of the mean reward of
    their tokens. A sample without such siblings has advantages of 0.

    Args:
        rewards_BL: rewards of the tokens, side by side, float64; 0 where a row has no token.
        count_B: number of tokens of each row.
        group_ids_B: any integers; samples of one prompt share an id.
        gamma: discount per token.
    """
    siblings = Siblings.of(group_ids_B)
    able_B = (count_B > 0).double()
    means_B = rewards_BL.sum(1) / count_B.clamp(min=1)
    others_B = siblings.sum(able_B) - able_B
    baseline_B = (siblings.sum(means_B) - means_B) / others_B.clamp(min=1)
    inside_BL = torch.arange(rewards_BL.shape[1]) < count_B[:, None]
    inside_BL = inside_BL & (others_B > 0)[:, None]
    centred_BL = (rewards_BL - baseline_B[:, None]) * inside_BL
    return discounted_sums(centred_BL, torch.tensor([gamma], dtype=torch.float64))


@ADVANTAGES.register(PrimeConfig)
@dataclass(frozen=True)
class Prime:
    """Leave-one-out advantage of the sample's total reward, plus that of its tokens' implicit
    rewards; see `process_advantages`."""

    config: PrimeConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages; raise ValueError without rewards or implicit rewards."""
        implicit_BT = batch.require("implicit_rewards", made_by="add_implicit_rewards")
        outcome_B = Rloo(RlooConfig()).per_sample(batch)
        tokens = TrainedTokens.counted(batch.loss_mask)
        process_BL = process_advantages(
            tokens.pack(implicit_BT), tokens.count_B, batch.group_ids, gamma=self.config.gamma
        )
        process_BT = self.config.process_coef * tokens.unpack(process_BL)
        return Estimate((outcome_B[:, None] * batch.loss_mask + process_BT).float())
