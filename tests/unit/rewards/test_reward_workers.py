"""A reward model keeps its budget, and comes and goes with the engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.errors import RewardError, WaitTimeoutError
from roll.core.types import Sample, WorkerSpec
from roll.distributed.colocation import Colocation, Resident
from roll.rewards.contract import sample_of
from roll.runtime.reward_router import RewardCluster
from roll.runtime.reward_workers import resident
from roll.workers.model_reward import ModelReward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("judge")
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def _worker(folder: Path, made: type[ModelReward] = ModelReward, **settings: Any) -> ModelReward:
    spec = WorkerSpec(Role.REWARD, 0, 1, (0,), (0,), 0, "127.0.0.1:1", 0, "cpu", label="judge")
    config = RewardConfig.model_validate({"model": {"path": str(folder)}, **settings})
    return made(spec, "judge", config)


def test_a_score_that_is_no_number_is_a_failure_within_a_budget(
    model: Path, tmp_path: Path
) -> None:
    broken = Qwen3ForSequenceClassification.from_pretrained(model)
    broken.score.weight.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path)

    async def run(**settings: Any) -> list[Any]:
        worker = _worker(tmp_path, **settings)
        await worker.start()
        await worker.begin_step(2)
        return await worker.score_samples([sample_of("a b", answer="")] * 2)

    left_out = asyncio.run(run(max_error_rate=1.0))
    assert [one.reward for one in left_out] == [None, None]
    assert "as nan" in left_out[0].failure
    spoken = asyncio.run(run(max_error_rate=1.0, on_error=-2.0))
    assert [one.reward.score for one in spoken] == [-2, -2]
    with pytest.raises(RewardError, match="'judge' failed on 1 of the first 1 samples"):
        asyncio.run(run())


def test_samples_wait_while_the_model_is_off_its_device(model: Path) -> None:
    async def run() -> None:
        worker = _worker(model)
        await worker.start()
        await worker.begin_step(1)
        await worker.offload()
        scoring = asyncio.ensure_future(worker.score_samples([sample_of("a b", answer="")]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not scoring.done()
        await worker.onload()
        [scored] = await scoring
        assert scored.failure is None

    with torch.no_grad():
        asyncio.run(run())


class Hanging(ModelReward):
    """A reward whose device hangs until it is let go."""

    let_go = threading.Event()

    def _scores(self, samples: list[Sample]) -> list[float]:
        assert self.let_go.wait(30)
        return super()._scores(samples)


def test_a_reward_model_whose_device_hangs_is_named_and_its_time_off_does_not_count(
    model: Path,
) -> None:
    async def run() -> None:
        worker = _worker(model, made=Hanging)
        worker.pass_s = 0.2
        await worker.start()
        await worker.begin_step(2)
        await worker.offload()
        scoring = asyncio.ensure_future(worker.score_samples([sample_of("a b", answer="")]))
        await asyncio.wait({scoring}, timeout=0.6)
        assert not scoring.done(), "it waits for its device"
        await worker.onload()
        with pytest.raises(WaitTimeoutError, match=r"reward 'judge': .* nothing for 0\.2 s"):
            await asyncio.wait_for(scoring, 10)
        Hanging.let_go.set()
        [scored] = await worker.score_samples([sample_of("a b", answer="")])
        assert scored.failure is None

    with torch.no_grad():
        asyncio.run(run())


def test_a_reward_model_that_gets_on_has_more_time_than_one_pass(model: Path) -> None:
    async def run() -> None:
        worker = _worker(model, max_tokens_per_microbatch=3)
        worker.pass_s = 5
        await worker.start()
        await worker.begin_step(6)
        assert worker._scorer is not None
        parts: Any = worker._scorer._model._parts
        parts[0].register_forward_pre_hook(lambda *_: time.sleep(1))
        samples = [sample_of("a b", answer="") for _ in range(6)]
        assert len(await worker.score_samples(samples)) == 6
        assert worker._scorer.passes == 6

    with torch.no_grad():
        asyncio.run(run())


@dataclass
class NotedCluster:
    """Notes where the judge is."""

    log: list[str] = field(default_factory=list)

    def call(self, method: Callable[..., Any]) -> None:
        self.log.append(method.__name__)


def test_a_reward_model_moves_off_for_training_and_comes_back_with_the_engines() -> None:
    engine: list[str] = []
    cluster = NotedCluster()
    colocation = Colocation(enabled=True)
    colocation.add(
        Role.ACTOR_INFER,
        Resident(
            frozenset({0}),
            lambda: engine.append("onload"),
            lambda: engine.append("offload"),
            lambda: engine.append("weights"),
        ),
    )
    judge = RewardCluster(RewardConfig.model_validate({"model": {"path": "m"}}), cluster)  # type: ignore[arg-type]
    colocation.add(f"{Role.ACTOR_INFER}/judge", resident(judge, frozenset({0})))
    colocation.add(Role.ACTOR_TRAIN, Resident(frozenset({0}), lambda: None, lambda: None))
    cluster.log.clear()
    with colocation.use(Role.ACTOR_INFER):
        assert cluster.log == ["onload"]
    with colocation.use(Role.ACTOR_TRAIN):
        assert cluster.log == ["onload", "offload"]
    with colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER):
        assert cluster.log == ["onload", "offload"], "a push needs no judge"
    with colocation.use(Role.ACTOR_INFER):
        assert cluster.log[-1] == "onload"
