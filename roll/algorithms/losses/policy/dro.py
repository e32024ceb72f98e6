"""DRO (direct reward optimisation): squared log-ratio to the frozen reference model."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.quadratic import squared_log_ratio
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import DroConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(DroConfig)
@dataclass(frozen=True)
class Dro:
    """Loss with the gradient of -A * log p + tau / 2 * (log(p / p_ref))**2 (arXiv 2405.19107).

    A is the reward minus a baseline. The formula equals 1 / (2 * tau) * (A - tau * log(p /
    p_ref))**2 up to a constant. The log-ratio is that of the whole response, and each trained token
    of a row carries an equal share of its square, so `sequence_sum` aggregation is the paper's sum.
    `level: token` squares the log-ratio of each token instead. While the policy equals the
    reference (step 0), the loss is -A and its gradient with respect to the log-prob is -A, for any
    tau.
    """

    config: DroConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages` and `ref_logprobs`.

        Metrics: `ratio/mean` and `approx_kl` of the old policy, which the loss does not use.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        gap_BT = terms.logprobs_BT - batch.require("ref_logprobs", made_by="add_logprobs")
        square_BT = squared_log_ratio(gap_BT, batch.loss_mask, self.config.level)
        log_ratio_BT = log_ratio(terms, batch)
        return TokenLoss(
            loss_BT=-unit(terms.logprobs_BT) * advantages_BT + self.config.tau / 2 * square_BT,
            metrics_BT=ratio_metrics(log_ratio_BT, bounded_exp(log_ratio_BT)),
        )
