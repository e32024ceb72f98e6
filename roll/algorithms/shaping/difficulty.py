"""How hard a prompt is for the policy, by the mean reward of its samples: mask and weight.

Both judge rewards as they were paid: shaped ones may be centred in every group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.shaping.interface import MASKS, SAMPLE_WEIGHTS
from roll.algorithms.siblings import Siblings
from roll.core.batches import RolloutBatch

ROUNDING = 1e-6
"""Of a mean of float32 rewards, as a share: a mean of 0.1 may come out as 0.10000000149."""


@MASKS.register("difficulty")
@dataclass(frozen=True, kw_only=True)
class DifficultyMask:
    """Only groups with low <= mean reward <= high are trained on; bounds count as inside."""

    low: float = 0.1
    high: float = 0.95

    def __call__(self, batch: RolloutBatch) -> Tensor:
        mean_B = Siblings.of(batch.group_ids).mean(batch.require("rewards", made_by="assemble"))
        low = self.low - ROUNDING * abs(self.low)
        high = self.high + ROUNDING * abs(self.high)
        return (mean_B >= low) & (mean_B <= high)


@SAMPLE_WEIGHTS.register("difficulty")
@dataclass(frozen=True, kw_only=True)
class DifficultyWeight:
    """min + (max - min) * difficulty, with difficulty = 1 - mean reward of the group in [0, 1]."""

    min: float = 0.5
    max: float = 1.5

    def __call__(self, batch: RolloutBatch) -> Tensor:
        mean_B = Siblings.of(batch.group_ids).mean(batch.require("rewards", made_by="assemble"))
        return self.min + (self.max - self.min) * (1 - mean_B.clamp(0, 1))
