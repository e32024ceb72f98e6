"""Bradley-Terry loss, which trains a reward model to score the better of two responses higher."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from roll.algorithms.loss_interface import ScoreTerms, TokenLoss
from roll.algorithms.losses.preferences import response_sums, spread
from roll.config.algorithm.preferences import BradleyTerryConfig
from roll.core.batches import PreferenceBatch


@dataclass(frozen=True, slots=True)
class BradleyTerryLoss:
    """Loss -log sigmoid(score chosen - score rejected - margin) + center_coef * (sum of scores)^2.

    The loss mask is True at exactly one token of each row, whose score is the score of the row.
    """

    config: BradleyTerryConfig

    def __call__(self, terms: ScoreTerms, batch: PreferenceBatch) -> TokenLoss:
        """Compute the loss; raise ValueError if `margins` are not set.

        Metrics: `preference_loss`, `accuracy`, `margin`, `score_chosen`, `score_rejected`, equal in
        both rows of a pair.
        """
        scores_B = response_sums(terms.scores_BT, batch.loss_mask)
        margins_B = batch.require("margins", made_by="pair_batch")
        chosen_P, rejected_P = scores_B[::2], scores_B[1::2]
        difference_P = chosen_P - rejected_P
        loss_P = -logsigmoid(difference_P - margins_B[::2])
        if self.config.center_coef:
            loss_P = loss_P + self.config.center_coef * (chosen_P + rejected_P).square()
        seen_P = difference_P.detach()
        named_P = {
            "preference_loss": loss_P.detach(),
            "accuracy": (seen_P > 0).float() + 0.5 * (seen_P == 0).float(),
            "margin": seen_P,
            "score_chosen": chosen_P.detach(),
            "score_rejected": rejected_P.detach(),
        }
        return TokenLoss(
            loss_BT=spread(loss_P, batch.loss_mask),
            metrics_B={name: value_P.repeat_interleave(2) for name, value_P in named_P.items()},
        )
