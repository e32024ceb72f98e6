"""Responses near or at the length limit: a soft penalty, or no training (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.shaping.interface import MASKS, REWARD_SHAPINGS, Rewards
from roll.algorithms.shaping.length import response_tokens
from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics


@REWARD_SHAPINGS.register("overlong_penalty")
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """reward + penalty * R, with the soft overlong punishment of DAPO (eq. 13):

        R = 0                                                     length <= max - buffer
        R = ((max_tokens - buffer_tokens) - length) / buffer_tokens    in between
        R = -1                                                    length >= max

    The greedy baseline, whose length is not known, stays.

    Metrics: `mean` of what is added, `penalized_fraction` of the samples.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def __call__(self, rewards: Rewards, batch: RolloutBatch) -> tuple[Rewards, Metrics]:
        free = self.max_tokens - self.buffer_tokens
        share_B = ((response_tokens(batch) - free) / self.buffer_tokens).clamp(0, 1)
        added_B = -self.penalty * share_B
        metrics = Metrics(
            {
                "mean": Mean(added_B.sum().item(), len(batch)),
                "penalized_fraction": Mean(int((share_B > 0).sum()), len(batch)),
            }
        )
        return Rewards(rewards.total_B + added_B, rewards.baseline_B), metrics


@MASKS.register("overlong")
@dataclass(frozen=True, kw_only=True)
class OverlongMask:
    """Only complete responses are trained on: what a truncated one is worth is not known (overlong
    filtering of DAPO)."""

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Needs `truncated`."""
        return ~batch.require("truncated", made_by="assemble")
