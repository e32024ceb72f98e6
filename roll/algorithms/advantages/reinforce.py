"""What follows a token as its advantage (REINFORCE), minus an optional baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.algorithms.advantages.rewards import rewards_to_go
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.core.batches import RolloutBatch


@ADVANTAGES.register("reinforce")
@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """(reward - baseline) * discount. The baseline goes off before the discount, so all tokens of a
    sample share its sign. Token rewards, if any, are added from their token backwards."""

    baseline: Literal["none", "batch"] = "none"
    gamma: float = 1.0

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        rewards_B = batch.require("rewards", made_by="assemble").double()
        if self.baseline == "batch":
            rewards_B = rewards_B - rewards_B.mean()
        return Estimate(rewards_to_go(rewards_B, batch, gamma=self.gamma).float())
