"""Clip-Cov: PPO without the gradient of a few tokens with a high covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.covariance.choice import covariance, draw, share_of_tokens
from roll.algorithms.losses.policy.ratio import (
    bounded_exp,
    clipped_surrogate,
    log_ratio,
    ratio_metrics,
)
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import ClipCovConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(ClipCovConfig)
@dataclass(frozen=True)
class ClipCov:
    """Clipped surrogate of PPO, but 0 on the chosen tokens (arXiv 2505.22617).

    The chosen tokens are `fraction` of the update's trained tokens, at least one, drawn from the
    tokens whose covariance of log-prob and advantage lies between `cov_low` and `cov_high`. The
    choice is made once per update, from `old_logprobs` (see `covariance`). At ratio 1, the loss of
    all other tokens is -A, and its gradient with respect to the log-prob is -A.
    """

    config: ClipCovConfig

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with `chosen_tokens`; needs `old_logprobs` and `advantages`."""
        config, covariance_BT = self.config, covariance(batch)
        candidates_BT = (covariance_BT > config.cov_low) & (covariance_BT < config.cov_high)
        count = share_of_tokens(config.fraction, batch.loss_mask)
        return replace(batch, chosen_tokens=draw(candidates_BT, count, batch))

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages` and `chosen_tokens`.

        Metrics: `ratio/mean`, `approx_kl`; `clip_fraction`, the share of tokens whose gradient is
        zero because of the ratio's clip; `cov_fraction`, the share of chosen tokens.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        chosen_BT = batch.require("chosen_tokens", made_by="SumLoss.prepare")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        loss_BT, cut_BT = clipped_surrogate(
            ratio_BT, advantages_BT, clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT) | {
            "clip_fraction": cut_BT,
            "cov_fraction": chosen_BT.to(ratio_BT.dtype),
        }
        return TokenLoss(loss_BT=loss_BT.masked_fill(chosen_BT, 0.0), metrics_BT=metrics_BT)
