"""What a worker of `actor_infer` makes of the failures of its engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from roll.config.sections.roles import Role
from roll.core.errors import EngineDiedError, EngineError
from roll.core.types import WorkerSpec
from roll.distributed.worker import Worker
from roll.workers.infer import InferWorker


class Fails:
    """An engine that cannot move."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def sleep(self) -> None:
        raise self._error

    async def wake(self, *, weights_only: bool = False) -> None:
        raise self._error


class Hosted(InferWorker):
    """Has the engine that it is given."""

    def __init__(self, spec: WorkerSpec, engine: Any) -> None:
        Worker.__init__(self, spec)
        self.engine = engine


def worker(error: Exception) -> Hosted:
    spec = WorkerSpec(
        role=Role.ACTOR_INFER,
        rank=3,
        world_size=4,
        devices=(),
        cores=(),
        node=0,
        rendezvous="127.0.0.1:1",
        seed=0,
        platform="cpu",
        host="127.0.0.1",
    )
    return Hosted(spec, Fails(error))


@pytest.mark.parametrize(
    "error",
    [
        Exception("Call to wake_up method failed: CUDA out of memory"),  # as vLLM tells of it
        RuntimeError("CUDA error"),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError("Cannot allocate memory"),
    ],
)
def test_an_engine_that_cannot_move_fails_as_an_engine_whatever_it_raises(error: Exception) -> None:
    found = type(error).__name__
    with pytest.raises(EngineError, match=rf"actor_infer\[3\] could not give .*: {found}: "):
        asyncio.run(worker(error).sleep())
    for weights_only in (False, True):
        with pytest.raises(EngineError, match=rf"actor_infer\[3\] could not take .*: {found}: "):
            asyncio.run(worker(error).wake(weights_only))


def test_the_death_of_an_engine_that_moves_is_told_as_it_is() -> None:
    died = EngineDiedError("vLLM of actor_infer[3] died")
    with pytest.raises(EngineDiedError, match=r"^vLLM of actor_infer\[3\] died$"):
        asyncio.run(worker(died).wake())
