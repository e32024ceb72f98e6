"""Soft penalty and mask for responses near or at the length limit (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.loss_interface import Samples
from roll.algorithms.shaping.interface import MASKS, REWARD_SHAPINGS
from roll.algorithms.shaping.length import episode_tokens, response_tokens
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm.shaping import OverlongMaskConfig, OverlongPenaltyConfig
from roll.core.metrics import Mean, Metrics


@REWARD_SHAPINGS.register(OverlongPenaltyConfig)
@dataclass(frozen=True)
class OverlongPenalty:
    """Penalty that changes a reward by penalty * R, the soft overlong punishment of DAPO (eq. 13).

        R = 0                                                   length <= max - buffer
        R = ((max - buffer) - length) / buffer                  in between
        R = -1                                                  length >= max

    max and buffer stand for `max_tokens`, which must be filled in, and `buffer_tokens`. The length
    is the number of tokens that the policy wrote. The greedy baseline does not change, because its
    length is not known.

    Metrics: `mean` of the changes; `penalized_fraction`, the share of samples with R below 0.
    """

    config: OverlongPenaltyConfig

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the changed rewards, and metrics; ValueError if `max_tokens` is not filled in."""
        max_tokens, buffer_tokens = self.config.limits()
        free = max_tokens - buffer_tokens
        share_B = ((self.lengths(batch) - free) / buffer_tokens).clamp(0, 1)
        added_B = -self.config.penalty * share_B
        metrics = Metrics(
            {
                "mean": Mean(added_B.sum().item(), len(batch)),
                "penalized_fraction": Mean(int((share_B > 0).sum()), len(batch)),
            }
        )
        return Rewards(rewards.total_B + added_B, rewards.baseline_B), metrics

    def lengths(self, batch: Samples) -> Tensor:
        """Return the length of each sample, in tokens, `[B]`."""
        return response_tokens(batch)


class EpisodePenalty(OverlongPenalty):
    """The same for episodes, whose length counts what others have said, too, as in their limit."""

    def lengths(self, batch: Samples) -> Tensor:
        """Return the length of each episode, in tokens, `[B]`."""
        return episode_tokens(batch)


@MASKS.register(OverlongMaskConfig)
@dataclass(frozen=True)
class OverlongMask:
    """Mask that keeps only complete responses (overlong filtering of DAPO).

    The true reward of a truncated response is not known.
    """

    config: OverlongMaskConfig

    def __call__(self, batch: Samples) -> Tensor:
        """Return which samples are complete, bool `[B]`; needs `truncated`."""
        return ~batch.require("truncated", made_by="assemble")
