"""KL-Cov: surrogate without clip, with a penalty on the tokens with the highest covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.covariance.choice import covariance, largest, share_of_tokens
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import KlCovConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(KlCovConfig)
@dataclass(frozen=True)
class KlCov:
    """Loss -ratio * A, plus penalty * |log ratio| on the chosen tokens (arXiv 2505.22617).

    The chosen tokens are the `fraction` of the update's trained tokens, at least one, with the
    highest covariance of log-prob and advantage. The choice is made once per update, from
    `old_logprobs` (see `covariance`). |log ratio| stands for the paper's KL(old || new) of a token,
    as in the authors' code. At ratio 1 the loss is -A, and its gradient with respect to the
    log-prob is -A.
    """

    config: KlCovConfig

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with `chosen_tokens`; needs `old_logprobs` and `advantages`."""
        count = share_of_tokens(self.config.fraction, batch.loss_mask)
        return replace(batch, chosen_tokens=largest(covariance(batch), count))

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages` and `chosen_tokens`.

        Metrics: `ratio/mean`, `approx_kl`, and `cov_fraction`, the share of chosen tokens.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        chosen_BT = batch.require("chosen_tokens", made_by="SumLoss.prepare")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        penalty_BT = (self.config.penalty * log_ratio_BT.abs()).masked_fill(~chosen_BT, 0.0)
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["cov_fraction"] = chosen_BT.to(ratio_BT.dtype)
        return TokenLoss(loss_BT=-ratio_BT * advantages_BT + penalty_BT, metrics_BT=metrics_BT)
