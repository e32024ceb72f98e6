"""Advantages with a length-weighted baseline, which has the least variance on-policy (OPO).

See arXiv 2505.23585.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import OpoConfig


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
