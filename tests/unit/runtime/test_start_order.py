"""Who starts when: side by side on CPUs, one after the other on shared GPUs; and engine memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.config import load_config
from roll.config.rlvr import RlvrConfig
from roll.config.sections.engines import VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.errors import IncompleteWeightsError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.runtime.clusters import start_model_clusters
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.vllm.engine import VllmEngine
from tests.tiny import char_tokenizer

RUN = Path(__file__).parents[3] / "examples" / "rlvr_quickstart" / "run.yaml"


class LoggedCluster:
    """Stands for a cluster and for the answers of its calls."""

    def __init__(self, role: Role, log: list[str]) -> None:
        self.role, self.log = role, log
        self.asked = ""

    def submit(self, method: Callable[..., Any], **kwargs: Any) -> LoggedCluster:
        self.asked = " ".join([self.role, method.__name__, *kwargs])
        self.log.append(f"{self.asked}?")
        return self

    def result(self, timeout_s: float) -> None:
        self.log.append(f"{self.asked}!")

    def call(self, method: Callable[..., Any], **kwargs: Any) -> None:
        self.log.append(" ".join([self.role, method.__name__, *kwargs]))

    def on(self, ranks: Sequence[int]) -> LoggedCluster:
        assert list(ranks) == [0]
        return self

    world_size = 1


class LoggedLauncher:
    """Starts nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, worker_cls: Any, placement: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{placement.role} begins")
        return LoggedCluster(placement.role, self.log)


def quickstart(*overrides: str) -> RlvrConfig:
    config = load_config(RUN, ["reference={pool: all}", *overrides]).config
    assert isinstance(config, RlvrConfig)
    return config


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("rollout") as loop:
        yield loop


def test_on_shared_gpus_each_role_leaves_before_the_next_begins(loop: LoopThread) -> None:
    launcher = LoggedLauncher()
    colocation = start_model_clusters(
        quickstart(), launcher, loop, "cuda", char_tokenizer()
    ).colocation
    assert launcher.log[:-1] == [
        "actor_infer begins",
        "actor_infer start?",
        "actor_infer start!",
        "actor_infer sleep drop_weights?",
        "actor_infer sleep drop_weights!",
        "actor_train begins",
        "actor_train offload",
        "reference begins",
        "reference offload",
    ]
    with colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER):
        assert launcher.log[-4:] == [
            "actor_train onload",
            "actor_train free_cached",
            "actor_infer wake weights_only?",
            "actor_infer wake weights_only!",
        ]


def test_roles_that_stay_beside_each_other_never_move(loop: LoopThread) -> None:
    launcher = LoggedLauncher()
    config = quickstart("cluster.colocate=beside")
    models = start_model_clusters(config, launcher, loop, "cuda", char_tokenizer())
    colocation = models.colocation
    assert launcher.log[:-1] == [
        "actor_infer begins",
        "actor_infer start?",
        "actor_infer start!",  # it measures the GPU before others are on it
        "actor_train begins",
        "reference begins",
    ]
    launcher.log.clear()
    for _ in range(2):
        with colocation.use(Role.ACTOR_INFER), colocation.use(Role.REFERENCE):
            pass
        with colocation.renewing(Role.ACTOR_INFER), colocation.use(Role.ACTOR_TRAIN):
            assert launcher.log == []
        with colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER):
            # The buckets of the push before would stay reserved.
            assert launcher.log == ["actor_train free_cached"]
        launcher.log.clear()
    assert not colocation.shares("actor_infer/0"), "a lost engine starts without leave of others"
    with colocation.starting("actor_infer/0"):
        assert launcher.log == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_where_nothing_is_scarce_the_engine_loads_while_the_others_do(
    platform: str, loop: LoopThread
) -> None:
    launcher = LoggedLauncher()
    apart = ["pools={all: '0', beside: '1', third: '2'}", "actor_infer.pool=beside"]
    config = quickstart(*apart, "reference.pool=third") if platform == "cuda" else quickstart()
    start_model_clusters(config, launcher, loop, platform, char_tokenizer())
    assert launcher.log == [
        "actor_infer begins",
        "actor_infer start?",
        "actor_train begins",
        "reference begins",
        "actor_infer start!",
    ]


def test_reward_models_wait_for_an_engine_that_measures_the_memory_of_their_gpu(
    loop: LoopThread,
) -> None:
    for pool in ("engines", "apart"):
        launcher = LoggedLauncher()
        config = quickstart(
            "pools={all: '0', engines: '1', third: '2', apart: '3'}",
            "actor_infer.pool=engines",
            "reference.pool=third",
            f"rewards.model={{model: {{path: scores}}, pool: {pool}, tags: [sort]}}",
        )
        start_model_clusters(config, launcher, loop, "cuda", char_tokenizer())
        ready, begins = map(launcher.log.index, ("actor_infer start!", "reward begins"))
        assert (ready < begins) == (pool == "engines"), launcher.log


class LoggedVllm:
    """The two calls of `AsyncLLM` that move memory, refusing what vLLM ignores with a warning."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.log: list[str] = []
        self.modes: list[str] = []

    async def sleep(self, level: int, mode: str) -> None:
        assert "weights" not in self.asleep
        self.modes.append(mode)
        self.asleep = {"weights", "kv_cache"}
        self.log.append("sleep" if level == 1 else f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        assert self.asleep >= set(tags)
        self.asleep -= set(tags)
        self.log.append(" ".join(tags))


def vllm_on_a_gpu(vllm: LoggedVllm, **options: Any) -> VllmEngine:
    spec = WorkerSpec(Role.ACTOR_INFER, 0, 1, (0,), (0,), 0, "127.0.0.1:1", 0, "cuda")
    model = ModelConfig(path="nowhere")
    setup = EngineSetup(spec=spec, model=model, dtype="bfloat16", max_model_len=64)
    engine = VllmEngine(VllmConfig(kind="vllm", **options), setup)
    engine._engine = vllm
    return engine


def test_vllm_brings_its_cache_back_only_to_generate() -> None:
    vllm = LoggedVllm()
    engine = vllm_on_a_gpu(vllm)

    async def steps() -> None:
        for _ in range(2):
            await engine.sleep()
            await engine.sleep()
            await engine.wake(weights_only=True)
            await engine.wake(weights_only=True)
            await engine.wake()
            await engine.wake()
        await engine.sleep()
        await engine.wake(weights_only=True)
        await engine.sleep()  # a checkpoint right after a push
        await engine.wake()

    asyncio.run(steps())
    turn = ["sleep", "weights", "kv_cache"]
    assert vllm.log == [*turn, *turn, "sleep", "weights", "sleep", "kv_cache weights"]


def test_vllm_drops_its_weights_only_where_new_ones_follow() -> None:
    vllm = LoggedVllm()
    engine = vllm_on_a_gpu(vllm, sleep_level=2)

    async def steps() -> None:
        await engine.sleep()  # a checkpoint right after a push
        await engine.wake()
        engine._pushes.require_whole_weights()
        await engine.sleep(drop_weights=True)
        await engine.wake()
        with pytest.raises(IncompleteWeightsError, match="sleep_level 2 has dropped them"):
            engine._pushes.require_whole_weights()

    asyncio.run(steps())
    assert vllm.log == ["sleep", "kv_cache weights", "sleep 2", "kv_cache weights"]


def test_requests_from_outside_outlive_the_sleep_of_vllm() -> None:
    alone, serving = LoggedVllm(), LoggedVllm()
    asyncio.run(vllm_on_a_gpu(alone).sleep())
    asyncio.run(vllm_on_a_gpu(serving, endpoint={"port": 8000}).sleep())
    assert alone.modes == ["abort"]
    assert serving.modes == ["keep"]
