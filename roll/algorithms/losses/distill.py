"""Losses from the divergence between policy and teacher.

See `roll.config.algorithm.divergences` for the divergences.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.divergences import DistillLossConfig
from roll.config.algorithm.losses import DistillTermConfig
from roll.core.batches import RolloutBatch, TrainBatch


@dataclass(frozen=True, slots=True)
class DistillLoss:
    """Loss coef * divergence - sft_coef * log p of each trained token."""

    config: DistillLossConfig

    def __call__(self, terms: PolicyTerms, batch: TrainBatch) -> TokenLoss:
        """Compute the loss, 0 outside the loss mask; raise ValueError without
        `terms.divergence_BT`.

        Metrics: `divergence` and `nll` (-log p), both in nats and without their coefficients.
        """
        config = self.config
        divergence_BT = _divergence(terms).masked_fill(~batch.loss_mask, 0.0)
        nll_BT = -terms.logprobs_BT.masked_fill(~batch.loss_mask, 0.0)
        shares_BT = {"distill": config.coef * divergence_BT}
        if config.sft_coef:
            shares_BT["sft"] = config.sft_coef * nll_BT
        first, *rest = shares_BT.values()
        return TokenLoss(
            loss_BT=sum(rest, start=first),
            parts_BT={name: share_BT.detach() for name, share_BT in shares_BT.items()},
            # Without coefficients, so that curves can be compared; validation reports these two.
            metrics_BT={"divergence": divergence_BT.detach(), "nll": nll_BT.detach()},
        )


@LOSSES.register(DistillTermConfig)
@dataclass(frozen=True)
class DistillTerm:
    """Divergence from the teacher as a loss term beside that of the policy."""

    config: DistillTermConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the divergence, in nats and without `coef`; raise ValueError without
        `terms.divergence_BT`.

        Metrics: `distill/divergence`, the same number.
        """
        divergence_BT = _divergence(terms)
        return TokenLoss(
            loss_BT=divergence_BT, metrics_BT={"distill/divergence": divergence_BT.detach()}
        )


def _divergence(terms: PolicyTerms) -> Tensor:
    """Return the divergence; raise ValueError if the forward pass computed none."""
    if terms.divergence_BT is None:
        raise ValueError("no teacher said anything of these rows; ask them first")
    return terms.divergence_BT
