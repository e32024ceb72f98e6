"""`LearnerWorker`: trains a model on batches that the driver sends, without generating samples."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from roll.algorithms.loss_interface import PolicyTerms, TermsLoss
from roll.algorithms.losses.preferences import response_sums
from roll.config.sections.model import ModelConfig
from roll.config.sections.training import LearnerRole
from roll.core.batches import LabelledBatch, RowColumn, TrainBatch
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.strategy.build import build_train
from roll.strategy.training.heads import Head, ScoreHead
from roll.strategy.training.reduce import LossMetrics
from roll.workers.model import TrainWorker
from roll.workers.work import WorkMeter

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


class LearnerWorker(TrainWorker[T], Generic[T, B]):
    """A worker that trains a model with one loss. T is the result type of the model's forward pass,
    B the type of the training batches.

    Args:
        total_updates: number of optimizer steps in the run, for the learning rate schedule.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        role: LearnerRole,
        model: ModelConfig,
        head: Head[T],
        loss: TermsLoss[T, B],
        total_updates: int,
    ) -> None:
        strategy = build_train(role, model, spec, head, total_steps=total_updates)
        writes = not isinstance(head, ScoreHead)
        super().__init__(spec, strategy, WorkMeter(model, trains=True, writes=writes))
        self.loss = loss

    @dispatch(SHARD_BATCH)
    def train(self, batch: B) -> Metrics:
        """Do one optimizer step on the rows of all ranks; return the metrics."""
        return self.update(self.taught(batch), self.loss)

    @dispatch(SHARD_BATCH)
    def evaluate(self, batch: B) -> Metrics:
        """Compute the loss on the rows without training; return its own metrics and
        `trained_tokens`.

        Metrics with a `/` in the name, such as `loss/total`, are left out. Rows without trained
        tokens do not count.
        """
        metrics = LossMetrics(0, 1)
        batch = self.taught(batch)
        loss = self.loss(self.score(batch), batch)
        metrics.add(loss, batch.loss_mask.float(), batch.loss_mask, torch.zeros(()))
        found = metrics.take()
        return Metrics({name: value for name, value in found.items() if "/" not in name})


class PreferenceWorker(LearnerWorker[PolicyTerms, Any]):
    """A worker that trains a policy on preferences or on labelled responses."""

    @dispatch(SHARD_BATCH)
    def base_sums(self, batch: TrainBatch) -> RowColumn:
        """Return the log-probability of each row's trained tokens, summed over them and computed
        with the adapter switched off. For a policy with a LoRA adapter, whose base model is the
        reference."""
        logprobs_BT = self.score_base(batch).logprobs_BT
        return RowColumn(values=response_sums(logprobs_BT, batch.loss_mask))

    @dispatch(SHARD_BATCH)
    def log_ratios(self, batch: LabelledBatch) -> RowColumn:
        """Return the log ratio of each row: the sum of the log-probabilities of its trained tokens
        under the policy, minus `ref_sums`.

        Raises:
            ValueError: `ref_sums` is not set.
        """
        logprobs_BT = self.score(batch).logprobs_BT
        sums_B = response_sums(logprobs_BT, batch.loss_mask)
        return RowColumn(values=sums_B - batch.require("ref_sums", made_by="add_reference"))
