"""What a worker of `actor_infer` makes of the failures of its engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineDiedError, EngineError
from roll.core.types import GenerateRequest, SamplingParams, WorkerSpec
from roll.distributed.worker import Worker
from roll.workers.infer import InferWorker
from tests.tiny import char_tokenizer


class Fails:
    """An engine that cannot move."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def sleep(self, *, drop_weights: bool = False) -> None:
        raise self._error

    async def wake(self, *, weights_only: bool = False) -> None:
        raise self._error


class Writes:
    """An engine that has written these completions."""

    def __init__(self, *written: Completion) -> None:
        self._written = list(written)

    async def start(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return self._written


class Hosted(InferWorker):
    """Has the engine that it is given."""

    def __init__(self, spec: WorkerSpec, engine: Any) -> None:
        Worker.__init__(self, spec)
        self.engine = engine


def worker(engine: Any) -> Hosted:
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
    return Hosted(spec, engine)


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
        asyncio.run(worker(Fails(error)).sleep())
    for weights_only in (False, True):
        with pytest.raises(EngineError, match=rf"actor_infer\[3\] could not take .*: {found}: "):
            asyncio.run(worker(Fails(error)).wake(weights_only))


def test_the_death_of_an_engine_that_moves_is_told_as_it_is() -> None:
    died = EngineDiedError("vLLM of actor_infer[3] died")
    with pytest.raises(EngineDiedError, match=r"^vLLM of actor_infer\[3\] died$"):
        asyncio.run(worker(Fails(died)).wake())


def test_finished_completions_come_with_the_text_that_rewards_read(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = (*tokenizer.encode("4 2"), tokenizer.eos_token_id)
    parts = [Completion.of(ids, [0.0] * len(ids), [0] * len(ids), f) for f in FinishReason]
    hosted = worker(Writes(*parts))
    hosted.model = ModelConfig(path=str(tmp_path))

    async def texts() -> list[str | None]:
        await hosted.start()
        request = GenerateRequest("0/a", (1,), SamplingParams(1.0, 8), n=3)
        return [written.text for written in await hosted.generate(request)]

    assert dict(zip(FinishReason, asyncio.run(texts()), strict=True)) == {
        FinishReason.STOP: "4 2",
        FinishReason.LENGTH: "4 2",
        FinishReason.ABORT: None,  # another replica goes on with it
    }
