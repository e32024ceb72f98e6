"""Clipped surrogate of PPO, with the options clip-higher and dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import (
    bounded_exp,
    clipped_surrogate,
    log_ratio,
    ratio_metrics,
)
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import PpoClipConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(PpoClipConfig)
@dataclass(frozen=True)
class PpoClip:
    """Loss -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (arXiv 1707.06347).

    `clip_high > clip_low` is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` = c limits the loss
    of a token with a negative advantage to -c * A, for any ratio (arXiv 1912.09729). At ratio 1 the
    loss is -A, and its gradient with respect to the log-prob is -A, for any bounds.
    """

    config: PpoClipConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`; `clip_fraction`, the share of tokens whose gradient is zero because
        of the clip; `approx_kl`, the estimate k3 of KL(old || new); `dual_clip_fraction`, the share
        of tokens at the bound of the dual clip, if it is on.
        """
        config, dual_clip = self.config, self.config.dual_clip
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        loss_BT, cut_BT = clipped_surrogate(
            ratio_BT, advantages_BT, clip_low=config.clip_low, clip_high=config.clip_high
        )
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT) | {"clip_fraction": cut_BT}
        if dual_clip is not None:
            # The bound is infinite where A >= 0, so that one `minimum` is right for both signs.
            bound_BT = (-dual_clip * advantages_BT).masked_fill(advantages_BT >= 0, torch.inf)
            metrics_BT["dual_clip_fraction"] = (loss_BT > bound_BT).to(ratio_BT.dtype)
            loss_BT = torch.minimum(loss_BT, bound_BT)
        return TokenLoss(loss_BT=loss_BT, metrics_BT=metrics_BT)
