"""Imitation loss: the negative log-likelihood of given tokens."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.core.batches import TrainBatch


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Loss -log p of each trained token."""

    def __call__(self, terms: PolicyTerms, batch: TrainBatch) -> TokenLoss:
        """Compute the loss, 0 outside the loss mask. Metrics: `nll`, the same number, detached."""
        loss_BT = -terms.logprobs_BT.masked_fill(~batch.loss_mask, 0.0)
        # `nll` is a mean over tokens for any aggregation, so that curves can be compared;
        # validation reports it.
        return TokenLoss(loss_BT=loss_BT, metrics_BT={"nll": loss_BT.detach()})
