"""Entropy bonus as a loss term."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import EntropyConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(EntropyConfig)
@dataclass(frozen=True)
class EntropyBonus:
    """Negative entropy of the policy, so that a positive coefficient rewards exploration.

    The term uses neither the ratio nor the advantage.
    """

    config: EntropyConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; raise ValueError if the forward pass computed no entropy."""
        if terms.entropy_BT is None:
            raise ValueError("the entropy bonus got no entropy from the forward pass")
        return TokenLoss(loss_BT=-terms.entropy_BT)
