"""Clip-Cov: PPO without the gradient of a few tokens of high covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.covariance import covariance, draw, share_of_tokens
from roll.algorithms.losses.policy.ratio import (
    bounded_exp,
    clipped_surrogate,
    log_ratio,
    ratio_metrics,
)
from roll.algorithms.registries import LOSSES
from roll.core.batches import RolloutBatch


@LOSSES.register("clip_cov")
@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """The clipped surrogate, and 0 on the chosen tokens: `fraction` of the update's trained tokens,
    at least one, drawn from those whose covariance of log-prob and advantage is between `cov_low`
    and `cov_high` (arXiv 2505.22617).

    Tokens are chosen once per update, from `old_logprobs` (see `covariance`). At ratio 1 the loss
    is -A and its gradient -A per log-prob on all tokens but the chosen ones.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    part: ClassVar[str] = "policy"
    importance_weighted: ClassVar[bool] = True

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Sets `chosen_tokens`; needs `old_logprobs` and `advantages` of the whole update."""
        covariance_BT = covariance(batch)
        candidates_BT = (covariance_BT > self.cov_low) & (covariance_BT < self.cov_high)
        count = share_of_tokens(self.fraction, batch.loss_mask)
        return replace(batch, chosen_tokens=draw(candidates_BT, count, batch))

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Needs `advantages` and `chosen_tokens`.

        Metrics: `ratio/mean`, `approx_kl`; `clip_fraction` of the ratio's clip; `cov_fraction`.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        chosen_BT = batch.require("chosen_tokens", made_by="SumLoss.prepare")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        loss_BT, cut_BT = clipped_surrogate(
            ratio_BT, advantages_BT, clip_low=self.clip_low, clip_high=self.clip_high
        )
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT) | {
            "clip_fraction": cut_BT,
            "cov_fraction": chosen_BT.to(ratio_BT.dtype),
        }
        return TokenLoss(loss_BT=loss_BT.masked_fill(chosen_BT, 0.0), metrics_BT=metrics_BT)
