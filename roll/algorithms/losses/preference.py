"""Loss of pairs of the policy's own samples (online DPO and its relatives)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.pairs import paired
from roll.algorithms.losses.preferences import paired_loss, response_sums
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.preferences import PreferenceTermConfig
from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable

S = TypeVar("S", RolloutBatch, SampleTable)


@LOSSES.register(PreferenceTermConfig)
@dataclass(frozen=True)
class PreferenceTerm:
    """Loss of the pairs of a step (arXiv 2402.04792), by one of the formulas of `pipeline: dpo`.

    The gradient of a sample depends on the log-prob of the other one. So the two are adjacent rows
    that no split parts, and the loss of the pair lies on all tokens of both, see
    `roll.algorithms.losses.preferences`.
    """

    config: PreferenceTermConfig

    def choose(self, samples: S) -> S:
        """Return the pairs among the samples of a step; ValueError: see `paired`."""
        return paired(samples)

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `ref_logprobs` if the formula compares with a reference.

        Metrics: those of `PairedLoss`.

        Raises:
            ValueError: the rows are no pairs, or `ref_logprobs` are missing.
        """
        if batch.unit != 2:
            raise ValueError("the rows of the batch are no pairs; run SumLoss.choose first")
        ref_B = None
        if self.config.formula.needs_reference:
            ref_BT = batch.require("ref_logprobs", made_by="add_logprobs")
            ref_B = response_sums(ref_BT, batch.loss_mask)
        return paired_loss(self.config.formula, terms.logprobs_BT, batch.loss_mask, ref_B)
