"""CISPO (MiniMax-M1): clipped importance weights instead of clipped updates."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import CispoConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(CispoConfig)
@dataclass(frozen=True)
class Cispo:
    """Loss with the gradient of -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p.

    sg stops the gradient (arXiv 2506.13585). A clipped token counts less, but keeps a gradient. The
    value is -clip(ratio) * A, without the factor log p. At ratio 1 the loss is therefore -A, and
    its gradient with respect to the log-prob is -A.
    """

    config: CispoConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, `approx_kl`, and `clip_fraction`, the share of tokens whose weight is
        clipped.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT).detach()
        clip_low, clip_high = self.config.clip_low, self.config.clip_high
        lowest = None if clip_low is None else 1 - clip_low
        weight_BT = ratio_BT.clamp(lowest, 1 + clip_high)
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["clip_fraction"] = (weight_BT != ratio_BT).to(ratio_BT.dtype)
        loss_BT = -weight_BT * unit(terms.logprobs_BT) * advantages_BT
        return TokenLoss(loss_BT=loss_BT, metrics_BT=metrics_BT)
