"""Policy mirror descent as in Kimi k1.5: squared log-ratio to the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.quadratic import squared_log_ratio
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import KimiConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(KimiConfig)
@dataclass(frozen=True)
class Kimi:
    """Loss with the gradient of -A * log p + tau / 2 * (log(p / p_old))**2 (arXiv 2501.12599).

    A is the reward minus the group's mean. The log-ratio is that of the whole response, and each
    trained token of a row carries an equal share of its square, so `sequence_sum` aggregation is
    the paper's sum. `level: token` squares the log-ratio of each token instead. The value of the
    first term is -A, without the factor log p. At ratio 1 the loss is therefore -A, and its
    gradient with respect to the log-prob is -A, for any tau.
    """

    config: KimiConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the square is 0.

        Metrics: `ratio/mean` and `approx_kl`.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        square_BT = squared_log_ratio(log_ratio_BT, batch.loss_mask, self.config.level)
        return TokenLoss(
            loss_BT=-unit(terms.logprobs_BT) * advantages_BT + self.config.tau / 2 * square_BT,
            metrics_BT=ratio_metrics(log_ratio_BT, bounded_exp(log_ratio_BT)),
        )
