"""The reward itself as the advantage (REINFORCE), minus an optional baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.registries import ADVANTAGES
from roll.core.batches import RolloutBatch


def discounts(mask_BT: Tensor, gamma: float) -> Tensor:
    """gamma ** (trained tokens that follow), float64 `[B, T]`, zero outside the mask.

    Only trained tokens count as steps: what an environment writes between two turns of the policy
    does not make the first turn less responsible for the reward.
    """
    trained_BT = mask_BT.double()
    up_to_BT = trained_BT.cumsum(1)
    following_BT = (up_to_BT[:, -1:] - up_to_BT).clamp(min=0)
    return gamma**following_BT * trained_BT


@ADVANTAGES.register("reinforce")
@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """(reward - baseline) * discount. The baseline goes off before the discount, so all tokens of a
    sample share its sign."""

    baseline: Literal["none", "batch"] = "none"
    gamma: float = 1.0

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        rewards_B = batch.require("rewards", made_by="assemble").double()
        if self.baseline == "batch":
            rewards_B = rewards_B - rewards_B.mean()
        return (rewards_B[:, None] * discounts(batch.loss_mask, self.gamma)).float()
