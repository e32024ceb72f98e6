"""Changes of a reward that depend on this reward only: bounds, factor and shift."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.shaping.interface import REWARD_SHAPINGS, Rewards
from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics


@REWARD_SHAPINGS.register("clip")
@dataclass(frozen=True, kw_only=True)
class ClipReward:
    """Clipping of rewards to [low, high]; also applies to the greedy baseline.

    Metrics: `clipped_fraction`, the share of samples whose reward is clipped.
    """

    low: float | None = None
    high: float | None = None

    def __call__(self, rewards: Rewards, batch: RolloutBatch) -> tuple[Rewards, Metrics]:
        clipped = rewards.map(lambda values_B: values_B.clamp(self.low, self.high))
        changed = int((clipped.total_B != rewards.total_B).sum())
        return clipped, Metrics({"clipped_fraction": Mean(changed, len(batch))})


@REWARD_SHAPINGS.register("scale")
@dataclass(frozen=True, kw_only=True)
class ScaleReward:
    """Scaled reward factor * reward + shift; also applies to the greedy baseline. No metrics."""

    factor: float = 1.0
    shift: float = 0.0

    def __call__(self, rewards: Rewards, batch: RolloutBatch) -> tuple[Rewards, Metrics]:
        return rewards.map(lambda values_B: self.factor * values_B + self.shift), Metrics()
