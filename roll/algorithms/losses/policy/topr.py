"""TOPR (tapered off-policy REINFORCE): a truncated ratio for bad responses, none for good ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import (
    bounded_exp,
    log_ratio,
    ratio_metrics,
    row_sums,
    unit,
)
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import ToprConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(ToprConfig)
@dataclass(frozen=True)
class Topr:
    """Loss with the gradient of -sg(w) * A * log p per token (arXiv 2503.14286), where

        w = positive_weight                     where A >= 0
        w = negative_weight * min(s, 1)         where A < 0

    sg stops the gradient. s is the ratio of the whole response, exp(sum of log ratios over a row's
    trained tokens). A bad response that has become unlikely under the policy gets a small weight
    and is not pushed down further, so the loss cannot diverge.

    The value is -w * A, without the factor log p. At ratio 1 the loss is therefore -A, and its
    gradient with respect to the log-prob is -A (with both weights 1).
    """

    config: ToprConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, the mean of min(s, 1); `approx_kl`, per token; `clip_fraction`, the
        share of tokens in bad responses whose s is truncated.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        sequence_B1 = bounded_exp(row_sums(log_ratio_BT.detach(), batch.loss_mask))
        kept_BT = sequence_B1.clamp(max=1).expand_as(log_ratio_BT)
        weight_BT = torch.where(
            advantages_BT >= 0,
            torch.full_like(kept_BT, self.config.positive_weight),
            self.config.negative_weight * kept_BT,
        )
        metrics_BT = ratio_metrics(log_ratio_BT, kept_BT)
        truncated_BT = (sequence_B1 > 1) & (advantages_BT < 0)
        metrics_BT["clip_fraction"] = truncated_BT.to(kept_BT.dtype)
        loss_BT = -weight_BT * unit(terms.logprobs_BT) * advantages_BT
        return TokenLoss(loss_BT=loss_BT, metrics_BT=metrics_BT)
