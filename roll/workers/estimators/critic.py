"""`CriticWorker`: predicts the value of each state and learns from the returns."""

from __future__ import annotations

from roll.algorithms.loss_interface import ValueTerms
from roll.algorithms.losses.value import ClippedValueLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import CriticRole
from roll.core.batches import RolloutBatch, TokenBatch, TokenColumn
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_train
from roll.strategy.training.heads import ValueHead
from roll.workers.model import TrainWorker
from roll.workers.work import WorkMeter


class CriticWorker(TrainWorker[ValueTerms]):
    """A worker of `critic`: one rank of the critic's training.

    Args:
        total_updates: number of optimizer steps in the run, for the learning rate schedule.
    """

    def __init__(
        self, spec: WorkerSpec, role: CriticRole, model: ModelConfig, total_updates: int
    ) -> None:
        strategy = build_train(role, model, spec, ValueHead(), total_steps=total_updates)
        super().__init__(spec, strategy, WorkMeter(model, trains=True, writes=False))
        self.loss = ClippedValueLoss(role.loss)

    @dispatch(SHARD_BATCH)
    def values(self, batch: TokenBatch) -> TokenColumn:
        """Return the value that the critic predicts at each token. The driver calls this before
        the first update of a step."""
        return TokenColumn(lengths=batch.lengths, values=self.score(batch).values_BT)

    @dispatch(SHARD_BATCH)
    def train(self, batch: RolloutBatch) -> Metrics:
        """Do one optimizer step on the rows of all ranks; return the metrics."""
        return self.update(batch, self.loss)
