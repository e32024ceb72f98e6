"""Mask and weight by the difficulty of a prompt, measured by the mean reward of its samples.

Both use the unshaped rewards, those of turns included, because shaped rewards may be centred in
every group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.rewards import scores
from roll.algorithms.loss_interface import Samples
from roll.algorithms.shaping.interface import MASKS, SAMPLE_WEIGHTS
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.shaping import DifficultyMaskConfig, DifficultyWeightConfig

ROUNDING = 1e-6
"""Relative tolerance of a mean of float32 rewards: a mean of 0.1 may be 0.10000000149."""


@MASKS.register(DifficultyMaskConfig)
@dataclass(frozen=True)
class DifficultyMask:
    """Mask that keeps groups with low <= mean reward <= high, both bounds included."""

    config: DifficultyMaskConfig

    def __call__(self, batch: Samples) -> Tensor:
        """Return which samples are of kept groups, bool `[B]`; ValueError without rewards."""
        mean_B = Siblings.of(batch.group_ids).mean(scores(batch))
        low, high = self.config.low, self.config.high
        low, high = low - ROUNDING * abs(low), high + ROUNDING * abs(high)
        return (mean_B >= low) & (mean_B <= high)


@SAMPLE_WEIGHTS.register(DifficultyWeightConfig)
@dataclass(frozen=True)
class DifficultyWeight:
    """Weight min + (max - min) * (1 - m), m being the group's mean reward clamped to [0, 1]."""

    config: DifficultyWeightConfig

    def __call__(self, batch: Samples) -> Tensor:
        """Return the weight of each sample, float64 `[B]`; ValueError without rewards."""
        mean_B = Siblings.of(batch.group_ids).mean(scores(batch))
        config = self.config
        return config.min + (config.max - config.min) * (1 - mean_B.clamp(0, 1))
