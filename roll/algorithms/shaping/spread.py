"""Mask by the spread of the rewards of a prompt (arXiv 2504.20073)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Samples
from roll.algorithms.shaping.interface import MASKS
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.shaping import SpreadMaskConfig


@MASKS.register(SpreadMaskConfig)
@dataclass(frozen=True)
class SpreadMask:
    """Mask that keeps the share `keep` of the groups, those with the largest standard deviation of
    their rewards."""

    config: SpreadMaskConfig

    def __call__(self, batch: Samples) -> Tensor:
        """Return which samples are of kept groups, bool `[B]`; ValueError without rewards."""
        siblings = Siblings.of(batch.group_ids)
        groups = len(siblings.size_G)
        std_G = torch.zeros(groups, dtype=torch.float64)
        std_G[siblings.group_B] = siblings.std(total_rewards(batch))
        order_G = torch.argsort(std_G, descending=True, stable=True)
        kept_G = torch.zeros(groups, dtype=torch.bool)
        # Rounded, since 0.07 * 100 is above 7 in binary.
        kept_G[order_G[: math.ceil(round(self.config.keep * groups, 6))]] = True
        return kept_G[siblings.group_B]
