"""The plain policy gradient (REINFORCE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.core.batches import RolloutBatch


@LOSSES.register("pg")
@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """The gradient of -A * log p per token (Williams 1992), without ratio and without clip.

    The value is -A at any ratio, not -A * log p, whose size says nothing about the policy; the
    gradient is -A per log-prob.
    """

    part: ClassVar[str] = "policy"
    importance_weighted: ClassVar[bool] = True

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Needs `advantages`. The ratio is reported but not used."""
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        return TokenLoss(
            loss_BT=-unit(terms.logprobs_BT) * advantages_BT,
            metrics_BT=ratio_metrics(log_ratio_BT, bounded_exp(log_ratio_BT)),
        )
