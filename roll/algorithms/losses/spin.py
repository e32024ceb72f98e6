"""Loss of pairs of the data set's answer and the policy's own response (SPIN, arXiv 2401.01335)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.pairs import paired_with_answers
from roll.algorithms.losses.preferences import paired_loss, response_sums
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.preferences import SigmoidConfig, SpinConfig
from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable

S = TypeVar("S", RolloutBatch, SampleTable)


@LOSSES.register(SpinConfig)
@dataclass(frozen=True)
class SpinTerm:
    """Loss of DPO with the policy before the step as the reference, which is the opponent that
    wrote the rejected responses; see `PreferenceTerm` for the form of the rows."""

    config: SpinConfig

    def choose(self, samples: S) -> S:
        """Return each sample behind the answer to its prompt.

        Raises:
            ValueError: the table has no answers, or log-probs of the samples alone were computed
                before.
        """
        if not isinstance(samples, SampleTable):
            raise ValueError("spin adds rows, and these would have no log-probs of models")
        return paired_with_answers(samples)

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss. In the first update of a step the policy is its own reference, also
        without `old_logprobs`.

        Metrics: those of `PairedLoss`.

        Raises:
            ValueError: the rows are no pairs.
        """
        if batch.unit != 2:
            raise ValueError("the rows of the batch are no pairs; run SumLoss.choose first")
        old_BT = batch.old_logprobs
        ref_BT = terms.logprobs_BT.detach() if old_BT is None else old_BT
        ref_B = response_sums(ref_BT, batch.loss_mask)
        formula = SigmoidConfig(beta=self.config.beta)
        return paired_loss(formula, terms.logprobs_BT, batch.loss_mask, ref_B)
