"""`CriticWorker`: predicts the value of each state and learns from the returns."""

from __future__ import annotations

from dataclasses import replace

from roll.algorithms.loss_interface import ValueTerms
from roll.algorithms.losses.value import ClippedValueLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import CriticRole
from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_train
from roll.strategy.training.heads import ValueHead
from roll.workers.model import TrainWorker


class CriticWorker(TrainWorker[ValueTerms]):
    """A worker of `critic`: one rank of the critic's training."""

    def __init__(
        self, spec: WorkerSpec, role: CriticRole, model: ModelConfig, total_updates: int
    ) -> None:
        strategy = build_train(role, model, spec, ValueHead(), total_steps=total_updates)
        super().__init__(spec, strategy)
        self.loss = ClippedValueLoss(role.loss)

    @dispatch(SHARD_BATCH)
    def add_values(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch with `values`, which the critic predicts. The driver calls this before
        the first update of a step."""
        return replace(batch, values=self.strategy.score(batch).values_BT)

    @dispatch(SHARD_BATCH)
    def train(self, batch: RolloutBatch) -> Metrics:
        """Do one optimizer step on the rows of all ranks; return the metrics."""
        return self.strategy.train(batch, self.loss)
