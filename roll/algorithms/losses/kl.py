"""Divergence from the frozen reference model as a loss term."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.registries import KL_ESTIMATORS, LOSSES
from roll.config.algorithm.losses import KlConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(KlConfig)
@dataclass(frozen=True)
class KlToReference:
    """KL(policy || reference) per token by one of the estimators of `roll.algorithms.kl`.

    While the policy equals the reference (step 0), the loss is 0, and so is the gradient of k2, k3
    and k3_k2grad. `SumLoss` reports the metric `kl/ref` for any loss, if the batch has
    `ref_logprobs`.
    """

    config: KlConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `ref_logprobs`."""
        ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
        return TokenLoss(loss_BT=KL_ESTIMATORS[self.config.estimator](terms.logprobs_BT, ref_BT))
