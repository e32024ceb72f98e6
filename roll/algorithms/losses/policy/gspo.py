"""GSPO (group sequence policy optimization): one importance ratio per response."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import (
    bounded_exp,
    clipped_surrogate,
    log_ratio,
    ratio_metrics,
    row_means,
    unit,
)
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import GspoConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(GspoConfig)
@dataclass(frozen=True)
class Gspo:
    """Loss -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) (arXiv 2507.18071).

    s is the geometric mean of the ratios of a row's trained tokens, exp(mean log ratio). Every
    token of a row has the same s, so `sequence_mean` aggregation is the paper's mean over
    responses. With `token_level`, the ratio is sg(s) * p / sg(p), where sg stops the gradient
    (GSPO-token). The value is the same, but the gradient of each token is scaled by its own
    advantage instead of the row's mean advantage.

    At ratio 1 the loss is -A, and its gradient with respect to the log-prob is -A. Without
    `token_level`, A in this gradient is the mean advantage of the row, which makes no difference if
    all tokens of a row have the same advantage.
    """

    config: GspoConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, the mean of s; `clip_fraction`, the share of tokens in clipped rows;
        `approx_kl`, per token.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        sequence_B1 = bounded_exp(row_means(log_ratio_BT, batch.loss_mask))
        if self.config.token_level:
            ratio_BT = sequence_B1.detach() * unit(terms.logprobs_BT)
        else:
            ratio_BT = sequence_B1.expand_as(log_ratio_BT)
        loss_BT, cut_BT = clipped_surrogate(
            ratio_BT, advantages_BT, clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT) | {"clip_fraction": cut_BT}
        return TokenLoss(loss_BT=loss_BT, metrics_BT=metrics_BT)
