"""Base classes of workers that hold a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from roll.algorithms.loss_interface import TermsLoss
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.metrics import Metrics
from roll.core.teacher_outputs import OutputHead
from roll.core.threads.write_thread import WriteThread, Written
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.dispatch import BROADCAST, JOIN, LEAST, dispatch
from roll.distributed.remote_values import RemoteValue
from roll.distributed.worker import Worker
from roll.platform.cuda import free_cached
from roll.strategy.interfaces import ScoreStrategy, TrainStrategy
from roll.workers.teacher_heads import TeacherHeads
from roll.workers.work import Work, WorkMeter

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


class ScoreWorker(Worker, Generic[T]):
    """A worker that runs forward passes of a model. T is the result type of a forward pass.
    `offload` and `onload` are described in `ScoreStrategy`."""

    def __init__(self, spec: WorkerSpec, strategy: ScoreStrategy[T], meter: WorkMeter) -> None:
        super().__init__(spec)
        self.strategy = strategy
        self.meter = meter

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info

    def score(self, batch: TokenBatch, *, squares: bool = False) -> T:
        """Compute the terms of a batch; see `ScoreStrategy.score`. The meter notes the passes."""
        with self.meter.noted("score", batch, counts=self.rank_info.is_dp_leader):
            return self.strategy.score(batch, squares=squares)

    @dispatch(JOIN)
    def take_work(self) -> list[Work]:
        """Return what this rank has computed since the last call. The driver calls this through
        `Cluster.beside`, and gets the lists of all ranks joined."""
        return self.meter.take()

    @dispatch(BROADCAST)
    def offload(self) -> None:
        self.strategy.offload()

    @dispatch(BROADCAST)
    def onload(self) -> None:
        self.strategy.onload()

    @dispatch(BROADCAST)
    def free_cached(self) -> None:
        """Give device memory that is reserved, but not in use, back to the device."""
        free_cached()

    def close(self) -> None:
        self.strategy.close()
        super().close()


class TrainWorker(ScoreWorker[T]):
    """A worker that trains a model. `save`, `load`, `save_hf` are described in `TrainStrategy`.

    A save beside the training begins with `begin_save`. The driver then asks `look_at_save` until
    every rank has written its own files, calls `complete_save`, and asks again. Both are called
    through `Cluster.beside`.
    """

    strategy: TrainStrategy[T]

    def __init__(self, spec: WorkerSpec, strategy: TrainStrategy[T], meter: WorkMeter) -> None:
        super().__init__(spec, strategy, meter)
        self.teacher_heads = TeacherHeads()
        self._save: WriteThread | None = None
        """Save beside the training; None before the first, and when the last one is complete."""

    def score_base(self, batch: TokenBatch) -> T:
        """Compute the terms of a batch with the adapter switched off, or with the copy that is the
        reference; see `TrainStrategy.score_base`. The meter notes the passes."""
        with self.meter.noted("score", batch, counts=self.rank_info.is_dp_leader):
            return self.strategy.score_base(batch)

    def update(self, batch: B, loss: TermsLoss[T, B]) -> Metrics:
        """Do an optimizer step; see `TrainStrategy.train`. The meter notes the passes."""
        with self.meter.noted("train", batch, counts=self.rank_info.is_dp_leader):
            return self.strategy.train(batch, loss)

    @dispatch(BROADCAST)
    def offload(self) -> None:
        """Offload the model, and drop the copies of the teachers' heads on the device."""
        self.teacher_heads.offload()  # first, as the other also frees what is reserved
        super().offload()

    @dispatch(BROADCAST)
    def free_cached(self) -> None:
        """Drop the copies of the teachers' heads, too."""
        self.teacher_heads.offload()
        super().free_cached()

    @dispatch(BROADCAST)
    def receive_teacher_heads(self, heads: Mapping[str, RemoteValue[OutputHead]]) -> None:
        """Store the heads of teachers, by teacher name, in place of all old ones. The driver calls
        this before it sends the first rows with outputs of these teachers. Ranks that make no
        logits need none."""
        if self.rank_info.has_head:
            self.teacher_heads.receive(heads)

    def taught(self, batch: B) -> B:
        """Return the batch with its `teacher_outputs` fetched, if it has any and this rank makes
        logits. Errors: see `TeacherHeads.resolve`."""
        return self.teacher_heads.resolve(batch) if self.rank_info.has_head else batch

    @dispatch(BROADCAST)
    def save(self, path: Path, *, optimizer: bool) -> None:
        self.strategy.save(path, optimizer=optimizer)

    @dispatch(BROADCAST)
    def begin_save(self, path: Path, *, optimizer: bool) -> None:
        """Copy the state to the memory of the machine, and begin to write it in a thread. The one
        before must be complete."""
        save = self.strategy.begin_save(path, copied=True, optimizer=optimizer)
        complete = save.complete if self.spec.rank == 0 else None
        self._save = WriteThread(save.write, complete, "roll-save")

    @dispatch(LEAST)
    def look_at_save(self) -> Written:
        """Return how far the save is on this rank, and forget it at its end.

        Raises:
            CheckpointError: this rank could not write.
        """
        if self._save is None:
            return Written.ALL
        written = self._save.look()
        if written is Written.ALL:
            self._save = None
        return written

    @dispatch(BROADCAST)
    def complete_save(self) -> None:
        """Let rank 0 write what belongs to all ranks. Every rank has written its own files."""
        if self._save is not None:
            self._save.go_on()

    @dispatch(BROADCAST)
    def load(self, path: Path) -> None:
        self.strategy.load(path)

    @dispatch(BROADCAST)
    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        self.strategy.save_hf(path, merged=merged)
