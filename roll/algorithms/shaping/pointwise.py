"""Changes of a reward that depend on this reward only: bounds, factor and shift."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import Samples
from roll.algorithms.shaping.interface import REWARD_SHAPINGS
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm.shaping import ClipRewardConfig, ScaleRewardConfig
from roll.core.metrics import Mean, Metrics


@REWARD_SHAPINGS.register(ClipRewardConfig)
@dataclass(frozen=True)
class ClipReward:
    """Clipping of rewards to [low, high]; also applies to the greedy baseline.

    Metrics: `clipped_fraction`, the share of samples whose reward is clipped.
    """

    config: ClipRewardConfig

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the clipped rewards, and metrics; `batch` is only counted."""
        low, high = self.config.low, self.config.high
        clipped = rewards.map(lambda values_B: values_B.clamp(low, high))
        changed = int((clipped.total_B != rewards.total_B).sum())
        return clipped, Metrics({"clipped_fraction": Mean(changed, len(batch))})


@REWARD_SHAPINGS.register(ScaleRewardConfig)
@dataclass(frozen=True)
class ScaleReward:
    """Scaled reward factor * reward + shift; also applies to the greedy baseline. No metrics."""

    config: ScaleRewardConfig

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the scaled rewards, and no metrics."""
        factor, shift = self.config.factor, self.config.shift
        return rewards.map(lambda values_B: factor * values_B + shift), Metrics()
