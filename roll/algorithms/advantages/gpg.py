"""Advantages of group policy gradient (GPG, arXiv 2504.02546)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import GpgConfig


def gpg_advantages(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return alpha * (reward - mean of its group), float64 `[B]`.

    alpha is the number of groups divided by the number of groups whose rewards differ (equation 7).
    A group of equal rewards has no gradient, so alpha turns a mean over all groups into one over
    those that have a gradient. If there are none, all advantages are 0.

    Args:
        rewards_B: any float dtype.
        group_ids_B: any integers; samples of one prompt share an id.
    """
    rewards_B = rewards_B.double()
    siblings = Siblings.of(group_ids_B)
    low_B, high_B = siblings.range(rewards_B)
    differ_B = high_B > low_B
    groups, useful = len(siblings.size_G), len(torch.unique(siblings.group_B[differ_B]))
    centred_B = (rewards_B - siblings.mean(rewards_B)).masked_fill(~differ_B, 0.0)
    return centred_B * (groups / max(useful, 1))


@ADVANTAGES.register(GpgConfig)
@dataclass(frozen=True)
class Gpg(SampleEstimator):
    """GPG advantage, the same on every trained token of a sample; 0 in a group of one."""

    config: GpgConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample's total reward, float64 `[B]`; ValueError without
        rewards."""
        return gpg_advantages(total_rewards(samples), samples.group_ids)
