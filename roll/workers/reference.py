"""`ReferenceWorker`: computes log-probabilities under the frozen reference model."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.preferences import response_sums
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import ScoreRole
from roll.core.batches import LabelledBatch, PreferenceBatch, RolloutBatch
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_score
from roll.strategy.training.heads import PolicyHead
from roll.workers.model import ScoreWorker

P = TypeVar("P", PreferenceBatch, LabelledBatch)


class ReferenceWorker(ScoreWorker[PolicyTerms]):
    """A worker of `reference`: one rank of the frozen model.

    Args:
        temperature: logits are divided by it before log-probabilities are computed.
    """

    def __init__(
        self, spec: WorkerSpec, role: ScoreRole, model: ModelConfig, temperature: float
    ) -> None:
        head = PolicyHead(temperature, role.logprob_chunk_tokens)
        super().__init__(spec, build_score(role, model, spec, head))

    @dispatch(SHARD_BATCH)
    def add_ref_logprobs(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with `ref_logprobs`."""
        return replace(batch, ref_logprobs=self.strategy.score(batch).logprobs_BT)

    @dispatch(SHARD_BATCH)
    def add_ref_sums(self, batch: P) -> P:
        """Return the batch with `ref_sums`: log-probabilities, summed over a row's trained
        tokens."""
        logprobs_BT = self.strategy.score(batch).logprobs_BT
        return replace(batch, ref_sums=response_sums(logprobs_BT, batch.loss_mask))
