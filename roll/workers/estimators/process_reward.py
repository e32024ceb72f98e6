"""`ProcessRewardWorker`: learns rewards of tokens from those of whole samples."""

from __future__ import annotations

from roll.algorithms.implicit.loss import OutcomeLoss
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import ProcessRewardRole
from roll.core.batches import RolloutBatch, TokenBatch, TokenColumn
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_train
from roll.strategy.training.heads import PolicyHead
from roll.workers.model import TrainWorker
from roll.workers.work import WorkMeter


class ProcessRewardWorker(TrainWorker[PolicyTerms]):
    """A worker of `process_reward`: one rank of the training of its model.

    Args:
        temperature: logits are divided by it, as those of the reference are.
        total_updates: number of optimizer steps in the run, for the learning rate schedule.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        role: ProcessRewardRole,
        model: ModelConfig,
        temperature: float,
        total_updates: int,
    ) -> None:
        head = PolicyHead(temperature, role.logprob_chunk_tokens)
        strategy = build_train(role, model, spec, head, total_steps=total_updates)
        super().__init__(spec, strategy, WorkMeter(model, trains=True))
        self.loss = OutcomeLoss(role.beta, role.threshold)

    @dispatch(SHARD_BATCH)
    def logprobs(self, batch: TokenBatch) -> TokenColumn:
        """Return the log-probability of each token under this model."""
        return TokenColumn(lengths=batch.lengths, values=self.score(batch).logprobs_BT)

    @dispatch(SHARD_BATCH)
    def train(self, batch: RolloutBatch) -> Metrics:
        """Do one optimizer step on the rows of all ranks; return the metrics."""
        return self.update(batch, self.loss)
