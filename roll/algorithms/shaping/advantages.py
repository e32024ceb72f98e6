"""Advantages on a common scale, and within bounds. Returns are not touched: a critic must predict
what is really paid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.moments import Moments, standardized
from roll.algorithms.shaping.interface import ADVANTAGE_SHAPINGS
from roll.core.metrics import Last, Mean, Metrics


@ADVANTAGE_SHAPINGS.register("whiten")
@dataclass(frozen=True, kw_only=True)
class WhitenAdvantage:
    """(advantage - mean) / (std + eps) over the trained tokens of the step, std unbiased.

    Without `mean` nothing is subtracted, before or after. Where there is no spread (equal
    advantages, a single token) nothing is divided: with `mean` such advantages become 0.

    Metrics: `mean` and `std` before.
    """

    mean: bool = True
    eps: float = 1e-6

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        moments = Moments.of(advantages_BT, mask_BT)
        whitened_BT = standardized(
            advantages_BT, mask_BT, eps=self.eps, center=self.mean, moments=moments
        )
        metrics = Metrics({"mean": Last(moments.mean), "std": Last(moments.std)})
        return whitened_BT, metrics


@ADVANTAGE_SHAPINGS.register("clip")
@dataclass(frozen=True, kw_only=True)
class ClipAdvantage:
    """min(max(advantage, -limit), limit).

    Metrics: `clipped_fraction` of the trained tokens.
    """

    limit: float

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        beyond_BT = (advantages_BT.abs() > self.limit) & mask_BT
        share = Mean(int(beyond_BT.sum()), int(mask_BT.sum()))
        clipped_BT = torch.clamp(advantages_BT, -self.limit, self.limit).masked_fill(~mask_BT, 0)
        return clipped_BT, Metrics({"clipped_fraction": share})
