"""KL-Cov: the plain surrogate, with a penalty on the tokens of highest covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.covariance import covariance, largest, share_of_tokens
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics
from roll.algorithms.registries import LOSSES
from roll.core.batches import RolloutBatch


@LOSSES.register("kl_cov")
@dataclass(frozen=True, kw_only=True)
class KlCov:
    """-ratio * A per token, plus penalty * |log ratio| on the chosen tokens: the `fraction` of the
    update's trained tokens, at least one, with the highest covariance of log-prob and advantage
    (arXiv 2505.22617).

    |log ratio| is how the authors' code writes the paper's KL(old || new) of a token. Tokens are
    chosen once per update, from `old_logprobs` (see `covariance`). At ratio 1 the loss is -A and
    its gradient -A per log-prob.
    """

    fraction: float = 2e-4
    penalty: float = 1.0

    part: ClassVar[str] = "policy"
    importance_weighted: ClassVar[bool] = True

    def prepare(self, batch: RolloutBatch) -> RolloutBatch:
        """Sets `chosen_tokens`; needs `old_logprobs` and `advantages` of the whole update."""
        count = share_of_tokens(self.fraction, batch.loss_mask)
        return replace(batch, chosen_tokens=largest(covariance(batch), count))

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Needs `advantages` and `chosen_tokens`.

        Metrics: `ratio/mean`, `approx_kl`, `cov_fraction`.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        chosen_BT = batch.require("chosen_tokens", made_by="SumLoss.prepare")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        penalty_BT = (self.penalty * log_ratio_BT.abs()).masked_fill(~chosen_BT, 0.0)
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["cov_fraction"] = chosen_BT.to(ratio_BT.dtype)
        return TokenLoss(loss_BT=-ratio_BT * advantages_BT + penalty_BT, metrics_BT=metrics_BT)
