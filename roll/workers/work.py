"""`WorkMeter`: notes the passes of a model, how many operations they are and how long they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.models.flops import ModelFlops, flops_of
from roll.platform.cuda import device_name

Kind = Literal["train", "score"]
"""Forward and backward passes, or forward passes alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """Passes of one kind that a rank has done since the last question."""

    kind: Kind
    flops: int | None
    """Operations that the passes need; None: they are not known of this model. 0 of a rank whose
    rows another rank counts."""
    seconds: float
    dtype: str
    """Dtype of the passes; `tfloat32` if products of float32 are rounded to it."""
    device: str | None
    """Name of the GPU; None without one."""


class WorkMeter:
    """Meter of the passes of one rank."""

    def __init__(self, model: ModelConfig, *, trains: bool, writes: bool = True) -> None:
        """Note nothing yet; the config of the model is read before the first pass.

        Args:
            trains: whether the model is trained.
            writes: whether it has a head with a logit for each token of the vocabulary.
        """
        self._model = model
        self._trains = trains
        self._writes = writes
        self._lock = threading.Lock()
        self._done: dict[Kind, tuple[int | None, float]] = {}

    @contextmanager
    def noted(self, kind: Kind, batch: TokenBatch, *, counts: bool = True) -> Iterator[None]:
        """Note the passes over a batch inside the block, unless it raises an error.

        Args:
            counts: False on a rank whose rows are those of another one, which counts them.
        """
        flops = self._needed(kind, batch) if counts else 0
        begun_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun_s
        with self._lock:
            before, before_s = self._done.get(kind, (0, 0.0))
            both = None if before is None or flops is None else before + flops
            self._done[kind] = both, before_s + seconds

    def take(self) -> list[Work]:
        """Return what was noted since the last call, and forget it. Any thread may call this."""
        with self._lock:
            done, self._done = self._done, {}
        dtype: str = self._model.dtype
        if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            dtype = "tfloat32"
        return [Work(kind, *noted, dtype, device_name()) for kind, noted in done.items()]

    @cached_property
    def _flops(self) -> ModelFlops | None:
        return flops_of(self._model, trains=self._trains, writes=self._writes)

    def _needed(self, kind: Kind, batch: TokenBatch) -> int | None:
        """Return the operations of the passes over a batch; None: they are not known."""
        flops = self._flops
        if flops is None:
            return None
        wanted = batch.loss_mask if isinstance(batch, TrainBatch) else batch.lengths
        count = flops.update if kind == "train" else flops.forward
        return count(batch.lengths, int(wanted.sum()))
