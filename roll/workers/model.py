"""Base classes of workers that hold a PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from roll.core.teacher_outputs import OutputHead
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.dispatch import BROADCAST, dispatch
from roll.distributed.remote_values import RemoteValue
from roll.distributed.worker import Worker
from roll.strategy.interfaces import ScoreStrategy, TrainStrategy
from roll.workers.teacher_heads import TeacherHeads

T = TypeVar("T")


class ScoreWorker(Worker, Generic[T]):
    """A worker that runs forward passes of a model. T is the result type of a forward pass.
    `offload` and `onload` are described in `ScoreStrategy`."""

    def __init__(self, spec: WorkerSpec, strategy: ScoreStrategy[T]) -> None:
        super().__init__(spec)
        self.strategy = strategy

    @property
    def rank_info(self) -> RankInfo:
        return self.strategy.rank_info

    @dispatch(BROADCAST)
    def offload(self) -> None:
        self.strategy.offload()

    @dispatch(BROADCAST)
    def onload(self) -> None:
        self.strategy.onload()

    def close(self) -> None:
        self.strategy.close()
        super().close()


class TrainWorker(ScoreWorker[T]):
    """A worker that trains a model. `save`, `load`, `save_hf` are described in `TrainStrategy`."""

    strategy: TrainStrategy[T]

    def __init__(self, spec: WorkerSpec, strategy: TrainStrategy[T]) -> None:
        super().__init__(spec, strategy)
        self.teacher_heads = TeacherHeads()

    @dispatch(BROADCAST)
    def offload(self) -> None:
        """Offload the model, and drop the copies of the teachers' heads on the device."""
        super().offload()
        self.teacher_heads.offload()

    @dispatch(BROADCAST)
    def receive_teacher_heads(self, heads: Mapping[str, RemoteValue[OutputHead]]) -> None:
        """Store the heads of teachers, by teacher name, in place of all old ones. The driver calls
        this before it sends the first rows with outputs of these teachers."""
        self.teacher_heads.receive(heads)

    @dispatch(BROADCAST)
    def save(self, path: Path) -> None:
        self.strategy.save(path)

    @dispatch(BROADCAST)
    def load(self, path: Path) -> None:
        self.strategy.load(path)

    @dispatch(BROADCAST)
    def save_hf(self, path: Path, *, merged: bool = False) -> None:
        self.strategy.save_hf(path, merged=merged)
