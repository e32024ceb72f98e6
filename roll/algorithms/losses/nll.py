"""Imitation of the good samples, as a term beside the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import row_sums
from roll.algorithms.registries import LOSSES
from roll.core.batches import RolloutBatch


@LOSSES.register("nll")
@dataclass(frozen=True, kw_only=True)
class PositiveNll:
    """-log p on the tokens of rows whose mean advantage is above zero, 0 elsewhere (the
    positive-example LM loss of VAPO, arXiv 2504.05118).

    The mean is the configured aggregation over all samples, where the paper divides by the tokens
    of the good ones alone: multiply `coef` by the share of good samples to compare. The ratio does
    not enter, so nothing special holds at ratio 1: the gradient is -1 per log-prob of a good token.
    """

    part: ClassVar[str] = "nll"
    importance_weighted: ClassVar[bool] = False

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Needs `advantages`. Metrics: `nll/positive_fraction`, of tokens."""
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        positive_B1 = row_sums(advantages_BT, batch.loss_mask) > 0
        positive_BT = positive_B1.expand_as(advantages_BT)
        return TokenLoss(
            loss_BT=-terms.logprobs_BT.masked_fill(~positive_BT, 0.0),
            metrics_BT={"nll/positive_fraction": positive_BT.to(terms.logprobs_BT.dtype)},
        )
