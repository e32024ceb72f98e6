"""GMPO (geometric-mean policy optimization): a ratio per response, with clips per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, row_means
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import GmpoConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(GmpoConfig)
@dataclass(frozen=True)
class Gmpo:
    """Loss -g * A (arXiv 2507.20673), where g = exp(mean of c) over a row's trained tokens and

        c = min(log ratio, clip_high)    where A >= 0
        c = max(log ratio, -clip_low)    where A < 0

    Every token of a row has the same g, so `sequence_mean` aggregation is the paper's mean over
    responses. The bounds apply to the log-ratio: 0.4 clips the ratio to (0.67, 1.49). At ratio 1
    the loss is -A, and its gradient with respect to the log-prob is -A (with one advantage per
    row).
    """

    config: GmpoConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, the mean of g; `approx_kl`; `clip_fraction`, the share of tokens
        whose log-ratio is clipped, so that their log-prob gets no gradient.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        kept_BT = torch.where(
            advantages_BT >= 0,
            log_ratio_BT.clamp(max=self.config.clip_high),
            log_ratio_BT.clamp(min=-self.config.clip_low),
        )
        ratio_BT = bounded_exp(row_means(kept_BT, batch.loss_mask)).expand_as(log_ratio_BT)
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["clip_fraction"] = (kept_BT != log_ratio_BT).to(ratio_BT.dtype)
        return TokenLoss(loss_BT=-ratio_BT * advantages_BT, metrics_BT=metrics_BT)
