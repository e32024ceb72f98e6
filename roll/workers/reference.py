"""`ReferenceWorker`: computes log-probabilities under the frozen reference model."""

from __future__ import annotations

from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.preferences import response_sums
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import ScoreRole
from roll.core.batches import RowColumn, ScoredSamples, TokenBatch, TokenColumn, TrainBatch
from roll.core.sample_table import SampleTable
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_score
from roll.strategy.training.heads import PolicyHead
from roll.workers.model import ScoreWorker
from roll.workers.samples import score_samples
from roll.workers.work import WorkMeter


class ReferenceWorker(ScoreWorker[PolicyTerms]):
    """A worker of `reference`: one rank of the frozen model.

    Args:
        temperature: logits are divided by it before log-probabilities are computed.
    """

    def __init__(
        self, spec: WorkerSpec, role: ScoreRole, model: ModelConfig, temperature: float
    ) -> None:
        head = PolicyHead(temperature, role.logprob_chunk_tokens)
        meter = WorkMeter(model, trains=False)
        super().__init__(spec, build_score(role, model, spec, head), meter)

    @dispatch(SHARD_BATCH)
    def logprobs(self, batch: TokenBatch) -> TokenColumn:
        """Return the log-probability of each token under this model."""
        return TokenColumn(lengths=batch.lengths, values=self.score(batch).logprobs_BT)

    @dispatch(SHARD_BATCH)
    def score_samples(self, table: SampleTable) -> ScoredSamples:
        """Compute the log-probability of each token under this model, and leave it in the object
        store of this node. Return an address for each row, without metrics."""
        return score_samples(
            table,
            lambda batch: self.score(batch).logprobs_BT,
            keeps=self.rank_info.is_dp_leader,
        )

    @dispatch(SHARD_BATCH)
    def response_sums(self, batch: TrainBatch) -> RowColumn:
        """Return the log-probability of each row's trained tokens, summed over them."""
        logprobs_BT = self.score(batch).logprobs_BT
        return RowColumn(values=response_sums(logprobs_BT, batch.loss_mask))
