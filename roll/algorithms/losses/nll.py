"""Imitation of the good samples, as a loss term beside that of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import row_sums
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import NllConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(NllConfig)
@dataclass(frozen=True)
class PositiveNll:
    """Loss -log p on tokens of rows with a mean advantage above zero (good samples), 0 elsewhere.

    This is the positive-example LM loss of VAPO (arXiv 2504.05118). The configured aggregation runs
    over all samples, while the paper divides by the tokens of the good samples only. Therefore
    `coef` times the share of good samples corresponds to the paper's coefficient. The term does not
    use the ratio; its gradient with respect to the log-prob of a token in a good sample is -1.
    """

    config: NllConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`.

        Metrics: `nll/positive_fraction`, the share of trained tokens in good samples.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        positive_B1 = row_sums(advantages_BT, batch.loss_mask) > 0
        positive_BT = positive_B1.expand_as(advantages_BT)
        return TokenLoss(
            loss_BT=-terms.logprobs_BT.masked_fill(~positive_BT, 0.0),
            metrics_BT={"nll/positive_fraction": positive_BT.to(terms.logprobs_BT.dtype)},
        )
