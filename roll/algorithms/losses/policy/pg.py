"""The plain policy gradient (REINFORCE)."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import PgConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(PgConfig)
@dataclass(frozen=True)
class PolicyGradient:
    """Loss with the gradient of -A * log p per token (Williams 1992), without ratio or clip.

    The value is -A at any ratio, because the size of -A * log p says nothing about the policy. The
    gradient with respect to the log-prob is -A.
    """

    config: PgConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`.

        Metrics: `ratio/mean` and `approx_kl` of the old policy, which the loss does not use.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        return TokenLoss(
            loss_BT=-unit(terms.logprobs_BT) * advantages_BT,
            metrics_BT=ratio_metrics(log_ratio_BT, bounded_exp(log_ratio_BT)),
        )
