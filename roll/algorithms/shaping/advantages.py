"""Advantage shaping: whitening and clipping.

Returns do not change, because a critic must predict the actual rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.moments import Moments, standardized
from roll.algorithms.shaping.interface import ADVANTAGE_SHAPINGS
from roll.config.algorithm.shaping import ClipAdvantageConfig, WhitenAdvantageConfig
from roll.core.metrics import Last, Mean, Metrics


@ADVANTAGE_SHAPINGS.register(WhitenAdvantageConfig)
@dataclass(frozen=True)
class WhitenAdvantage:
    """Whitening (advantage - mean) / (std + eps) over the step's trained tokens, std unbiased.

    If `mean` is False, the mean is not subtracted. Without spread (equal advantages, or a single
    token) the advantages are not divided; with `mean` they then become 0.

    Metrics: `mean` and `std` of the advantages before whitening.
    """

    config: WhitenAdvantageConfig

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        """Return the whitened advantages, 0 outside the mask, and metrics."""
        config, moments = self.config, Moments.of(advantages_BT, mask_BT)
        whitened_BT = standardized(
            advantages_BT, mask_BT, eps=config.eps, center=config.mean, moments=moments
        )
        metrics = Metrics({"mean": Last(moments.mean), "std": Last(moments.std)})
        return whitened_BT, metrics


@ADVANTAGE_SHAPINGS.register(ClipAdvantageConfig)
@dataclass(frozen=True)
class ClipAdvantage:
    """Clipping of advantages to [-limit, limit].

    Metrics: `clipped_fraction`, the share of trained tokens whose advantage is clipped.
    """

    config: ClipAdvantageConfig

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        """Return the clipped advantages, 0 outside the mask, and metrics."""
        limit = self.config.limit
        beyond_BT = (advantages_BT.abs() > limit) & mask_BT
        share = Mean(int(beyond_BT.sum()), int(mask_BT.sum()))
        clipped_BT = torch.clamp(advantages_BT, -limit, limit).masked_fill(~mask_BT, 0)
        return clipped_BT, Metrics({"clipped_fraction": share})
