"""Scoring with plain Hugging Face forward passes, the reference for tests of other backends."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from roll.config.sections.strategy import HfScoreConfig
from roll.core.batches import TokenBatch
from roll.core.teacher_outputs import OutputHead
from roll.core.types import RankInfo
from roll.platform import get_platform
from roll.platform.cuda import free_cached
from roll.strategy.backend_setup import ModelSetup
from roll.strategy.training import forward
from roll.strategy.training.teacher_forward import output_head

T = TypeVar("T")


class HfScore(Generic[T]):
    """Implementation of `ScoreStrategy`; each rank holds the full model and scores its own rows."""

    def __init__(self, config: HfScoreConfig, setup: ModelSetup[T]) -> None:
        self._device = get_platform(setup.spec.platform).device()
        self._max_tokens = setup.max_tokens_per_microbatch
        self._model = setup.head.load(setup.model, getattr(torch, setup.model.dtype))
        self._model.compile_layers(setup.model)
        if setup.packing:
            self._model.pack_rows()
        self._model.eval().requires_grad_(False).to(self._device)
        self.passes = 0
        """Number of micro-batches that were scored so far."""
        self._rank_info = RankInfo(
            setup.spec.rank, setup.spec.rank, setup.spec.world_size, is_dp_leader=True
        )

    @property
    def rank_info(self) -> RankInfo:
        return self._rank_info

    def score(self, batch: TokenBatch, *, entropy: bool = False, squares: bool = False) -> T:
        return forward.score(
            self._model,
            batch,
            device=self._device,
            max_tokens=self._max_tokens,
            entropy=entropy,
            squares=squares,
            agree=lambda passes: passes,
            passed=self._count,
        )

    def _count(self) -> None:
        """Count one more micro-batch."""
        self.passes += 1

    def output_head(self) -> OutputHead:
        return output_head(self._model.model, lambda part: part)

    def offload(self) -> None:
        self._model.to("cpu")
        free_cached()

    def onload(self) -> None:
        self._model.to(self._device)

    def close(self) -> None:
        """Do nothing: this backend has no process group and no threads."""
