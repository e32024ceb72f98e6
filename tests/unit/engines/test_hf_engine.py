"""The `hf` engine when a push of weights goes wrong."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.config.sections.engines import HfEngineConfig
from roll.config.sections.model import ModelConfig
from roll.core.completion import FinishReason
from roll.core.errors import IncompleteWeightsError, WeightSyncError
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf.engine import HfEngine
from roll.strategy.hf.grammar import Grammars, Matcher
from roll.strategy.hf.memory import Places, WeightMemory
from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.transfer import send
from roll.weight_sync.transport_choice import new_channel
from tests.contract.engine_rig import SPEC, request, weights_of
from tests.tiny import save_tiny_model


class Full(Places):
    """Runs out of memory at the third tensor."""

    left = 3

    def place(self, meta: TensorMeta) -> Tensor | None:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("out of memory")
        return super().place(meta)


class FullOnce(WeightMemory):
    """At its first push."""

    pushes = 0

    def places(self) -> Places:
        self.pushes += 1
        kind = Full if self.pushes == 1 else Places
        return kind(self._saved, self._by_name, self._own)


class Engine(HfEngine):
    def _load_model(self) -> None:
        super()._load_model()
        self._memory = FullOnce(self._weights.model)


def tiny_setup(folder: Path) -> EngineSetup:
    save_tiny_model(folder)
    return EngineSetup(
        spec=SPEC, model=ModelConfig(path=str(folder)), dtype="float32", max_model_len=64
    )


async def push(engine: HfEngine, tensors: list[tuple[str, Tensor]], version: int) -> None:
    channel = new_channel("shared_memory", num_receivers=1, timeout_s=30)
    loading = asyncio.ensure_future(engine.load_weights(channel, version, receiver=0, verify=False))
    with ThreadPoolExecutor(1) as pool:
        manifest = Manifest.of(tensors)
        sending = pool.submit(send, channel, iter(tensors), manifest, verify=False)
        try:
            await loading
        finally:
            error = await asyncio.to_thread(sending.exception)
    assert error is None


def test_a_push_that_breaks_off_for_any_reason_leaves_an_engine_that_writes_nothing(
    tmp_path: Path,
) -> None:
    setup = tiny_setup(tmp_path)

    async def main() -> None:
        engine = Engine(HfEngineConfig(), setup)
        await engine.start()
        tensors = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path))
        with pytest.raises(WeightSyncError, match=r"actor_infer\[0\].*OutOfMemoryError: out of"):
            await push(engine, tensors, 1)
        with pytest.raises(IncompleteWeightsError, match="OutOfMemoryError: out of memory"):
            await engine.generate(request(tokens=4))
        await push(engine, tensors, 2)
        (found,) = await engine.generate(request(tokens=4))
        assert set(found.versions) == {2}
        await engine.close()

    asyncio.run(main())


class SlowGrammars(Grammars):
    """Compiles a grammar when it may."""

    begun, may_end = threading.Event(), threading.Event()

    def matchers(self, schema: str, siblings: int, eos: frozenset[int]) -> list[Matcher]:
        self.begun.set()
        assert self.may_end.wait(30)
        return super().matchers(schema, siblings, eos)


class SlowlyCompiling(HfEngine):
    def _load_model(self) -> None:
        super()._load_model()
        self._grammars.__class__ = SlowGrammars


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_writes_nothing(
    tmp_path: Path,
) -> None:
    setup = tiny_setup(tmp_path)

    async def main() -> None:
        engine = SlowlyCompiling(HfEngineConfig(), setup)
        await engine.start()
        plain = request(tokens=8)
        asked = replace(plain, sampling=replace(plain.sampling, json_schema="{}"))
        generating = asyncio.ensure_future(engine.generate(asked))
        assert await asyncio.to_thread(SlowGrammars.begun.wait, 30)
        await engine.abort(asked.id)
        SlowGrammars.may_end.set()
        (aborted,) = await asyncio.wait_for(generating, 30)
        assert (len(aborted), aborted.finish) == (0, FinishReason.ABORT)
        (again,) = await engine.generate(asked)
        assert len(again) > 0, "the same id may be used again"
        await engine.close()

    asyncio.run(main())
