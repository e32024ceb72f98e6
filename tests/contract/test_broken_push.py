"""A receiver that dies in a push, among real engines: requests of the others end well.

Every token is looked up in the model of its version, so one that torn weights wrote would show.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.sections.engines import HfEngineConfig
from roll.config.sections.model import ModelConfig
from roll.core.completion import Completion
from roll.core.errors import EngineDiedError, WeightSyncError
from roll.core.types import GenerateRequest, Heartbeat
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.hf.engine import HfEngine
from roll.strategy.interfaces import LoadReport
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive, send
from roll.weight_sync.transport_choice import new_channel
from tests.contract.engine_rig import PROMPT, SPEC, request, rescore, shake, weights_of
from tests.tiny import save_tiny_model

DYING = 3


class Dies(HfEngine):
    """Dies at the third tensor of its first push."""

    dead = False

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        await asyncio.to_thread(self._take_three, channel, receiver)
        raise AssertionError("unreachable")

    def _take_three(self, channel: Channel, receiver: int) -> None:
        with receive(channel, receiver, check=lambda manifest: None) as incoming:
            tensors = incoming.tensors()
            for _ in range(3):
                next(tensors)
            self.dead = True
            raise EngineDiedError("the engine's process is gone")

    async def heartbeat(self) -> Heartbeat:
        self._require_life()
        return await super().heartbeat()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        found = await super().generate(request)
        self._require_life()
        return found

    def _require_life(self) -> None:
        if self.dead:
            raise EngineDiedError("the engine's process is gone")


class Trainer:
    """Pushes the oracle's weights to some of the engines."""

    def __init__(self, engines: Sequence[HfEngine], oracle: PreTrainedModel) -> None:
        self.engines = engines
        self.oracle = oracle
        self.pushes: list[list[int]] = []
        self.broken: list[int] = []

    async def push(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        self.pushes.append(list(indices))
        tensors = weights_of(self.oracle)
        channel = new_channel(
            "shared_memory", num_receivers=len(indices), bucket_bytes=4096, timeout_s=60
        )
        loading = [
            self.engines[index].load_weights(channel, 1, receiver=place, verify=False)
            for place, index in enumerate(indices)
        ]
        sending = asyncio.to_thread(
            send, channel, iter(tensors), Manifest.of(tensors), verify=False
        )
        results = await asyncio.gather(sending, *loading, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self.broken = list(indices)
            raise next(error for error in errors if isinstance(error, WeightSyncError))


async def run(path: Path) -> tuple[list[Completion], Fleet, Trainer, list[PreTrainedModel]]:
    setup = EngineSetup(
        spec=SPEC, model=ModelConfig(path=str(path)), dtype="float32", max_model_len=512
    )
    engines = [
        (Dies if index == DYING else HfEngine)(HfEngineConfig(), setup) for index in range(5)
    ]
    await asyncio.gather(*(engine.start() for engine in engines))
    oracle = AutoModelForCausalLM.from_pretrained(path)
    models = [copy.deepcopy(oracle)]
    shake(oracle, seed=5)
    models.append(oracle)
    fleet = Fleet([Replica(index, engine, 4) for index, engine in enumerate(engines)])
    fleet.on_lost = lambda replica, reason: None
    trainer = Trainer(engines, oracle)

    async def ask(number: int) -> list[Completion]:
        one = request(n=2, tokens=60, ignore_eos=True, seed=number)
        return await fleet.generate(one, session=one.id, timeout_s=120)

    running = [asyncio.create_task(ask(number)) for number in range(2)]
    await asyncio.sleep(0.05)

    async def more(indices: Sequence[int]) -> None:
        """Requests that come while weights do."""
        running.extend(asyncio.create_task(ask(10 * len(running) + i)) for i in range(4))
        await asyncio.sleep(0)
        await trainer.push(indices)

    await fleet.update_weights(1, more)
    found = [completion for siblings in await asyncio.gather(*running) for completion in siblings]
    await asyncio.gather(*(engine.close() for engine in engines))
    return found, fleet, trainer, models


def test_five_real_engines_outlive_one_that_dies_in_a_push(tmp_path: Path) -> None:
    found, fleet, trainer, models = asyncio.run(run(save_tiny_model(tmp_path)))
    assert DYING in trainer.broken
    survivors = [index for index in trainer.broken if index != DYING]
    assert survivors
    assert survivors in trainer.pushes
    assert [replica.serving for replica in fleet.replicas] == [index != DYING for index in range(5)]
    assert len(found) >= 2 * 6
    for completion in found:
        assert len(completion.tokens) == 60
        scores = torch.stack([rescore(model, PROMPT, completion.tokens) for model in models])
        expected = scores[list(completion.versions), torch.arange(60)]
        assert torch.tensor(completion.logprobs).tolist() == pytest.approx(
            expected.tolist(), abs=1e-4
        )
