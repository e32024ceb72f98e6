"""Clusters in this process: waits on two calls, names, and an end that closes what workers own."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.errors import EngineError, WaitTimeoutError
from roll.core.types import Sample, WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.distributed.pending import both
from roll.distributed.worker import Worker
from roll.rewards.api import Reward, RewardContext
from roll.rewards.contract import sample_of
from roll.workers.infer import InferWorker
from roll.workers.reward import RewardWorker

PLACE = Placement(Role.REWARD, pool="all")


class Partner(Worker):
    """One side of a transfer."""

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def fail(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        raise EngineError("the engine is dead")


def test_two_calls_give_both_results() -> None:
    with LocalLauncher() as launcher:
        one, other = launcher.start(Partner, PLACE), launcher.start(Partner, PLACE)
        results = both(one.submit(Partner.wait, 0.3), other.submit(Partner.wait, 0.0))
    assert results == ("done", "done")


@pytest.mark.parametrize("failing_first", [True, False])
def test_the_first_failure_ends_the_wait_for_the_other_side(failing_first: bool) -> None:
    with LocalLauncher() as launcher:
        one, other = launcher.start(Partner, PLACE), launcher.start(Partner, PLACE)
        failing, hanging = one.submit(Partner.fail, 0.3), other.submit(Partner.wait, 3600.0)
        begun = time.monotonic()
        with pytest.raises(EngineError, match="engine is dead"):
            both(failing, hanging) if failing_first else both(hanging, failing)
        assert time.monotonic() - begun < 2


def test_a_wait_for_both_ends_at_the_limit_of_a_call() -> None:
    with LocalLauncher(call_timeout_s=0.3) as launcher:
        one, other = launcher.start(Partner, PLACE), launcher.start(Partner, PLACE)
        with pytest.raises(WaitTimeoutError, match=r"waited 0\.3 s for reward\[0\]\.wait"):
            both(one.submit(Partner.wait, 0.0), other.submit(Partner.wait, 2.0))


def test_a_label_tells_clusters_of_one_role_apart() -> None:
    with LocalLauncher() as launcher:
        place = Placement(Role.REWARD, pool="all", workers=2, label="math")
        cluster = launcher.start(Partner, place)
        assert cluster.name == "reward:math[0..1]"
        assert cluster.call_each(Partner.ping) == ["reward:math[0]", "reward:math[1]"]


class Owner(RewardWorker):
    """Owns a connection."""

    closed: list[str] = []

    async def setup(self, ctx: RewardContext, **kwargs: Any) -> None:
        self.connection = f"{ctx.name} connected"

    def score(self, sample: Sample, ctx: RewardContext) -> Reward:
        return Reward(0.0)

    async def teardown(self) -> None:
        Owner.closed.append(self.connection)


def test_the_end_tears_a_reward_down_once() -> None:
    Owner.closed.clear()
    with LocalLauncher() as launcher:
        cluster = launcher.start(Owner, PLACE, "judge", RewardConfig(worker="x:Owner"))
        cluster.call(Owner.start)
        cluster.close()
    assert Owner.closed == ["judge connected"]


def test_a_worker_that_was_never_started_closes_too() -> None:
    Owner.closed.clear()
    with LocalLauncher() as launcher:
        launcher.start(Owner, PLACE, "judge", RewardConfig(worker="x:Owner"))
    assert Owner.closed == []


class FakeEngine:
    """Notes that it was closed."""

    closed = False

    async def close(self) -> None:
        self.closed = True


class HostOfFake(InferWorker):
    """An InferWorker around an engine that is already there."""

    def __init__(self, spec: Any, engine: Any) -> None:
        Worker.__init__(self, spec)
        self.engine = engine


def test_the_end_closes_the_engine() -> None:
    engine = FakeEngine()
    with LocalLauncher() as launcher:
        launcher.start(HostOfFake, Placement(Role.ACTOR_INFER, pool="all"), engine)
    assert engine.closed


def test_one_cluster_that_fails_to_close_does_not_keep_others_open() -> None:
    class Stuck(Worker):
        def close(self) -> None:
            raise EngineError("stuck")

    engine, launcher = FakeEngine(), LocalLauncher()
    launcher.start(HostOfFake, Placement(Role.ACTOR_INFER, pool="all"), engine)
    launcher.start(Stuck, PLACE)
    with pytest.raises(EngineError, match="stuck"):
        launcher.close()
    assert engine.closed


class AsyncOwner(RewardWorker):
    """Notes the event loop of each of its methods."""

    loops: list[asyncio.AbstractEventLoop] = []

    async def setup(self, ctx: RewardContext, **kwargs: Any) -> None:
        self.loops.append(asyncio.get_running_loop())

    async def score(self, sample: Sample, ctx: RewardContext) -> float:
        self.loops.append(asyncio.get_running_loop())
        return 1.0

    async def teardown(self) -> None:
        self.loops.append(asyncio.get_running_loop())


def test_an_async_worker_works_on_the_loop_that_it_was_set_up_on() -> None:
    with LocalLauncher() as launcher:
        config = RewardConfig(worker="x:AsyncOwner")
        cluster = launcher.start(AsyncOwner, PLACE, "judge", config)
        cluster.call(RewardWorker.start)
        cluster.call(RewardWorker.begin_step, 1)
        [scored] = cluster.call(RewardWorker.score_samples, [sample_of("a", answer="")])
        assert scored.reward is not None
        assert scored.reward.score == 1
    assert len(AsyncOwner.loops) == 3
    assert len(set(AsyncOwner.loops)) == 1


class Closing(InferWorker):
    """Notes that it was closed; cannot be built with the number of its `broken` rank."""

    closed: list[int] = []

    def __init__(self, spec: WorkerSpec, broken: int = -1) -> None:
        Worker.__init__(self, spec)
        if spec.rank == broken:
            raise EngineError("cannot be built")

    async def close(self) -> None:
        Closing.closed.append(self.spec.rank)


def test_a_cluster_with_an_ended_worker_closes_each_worker_once() -> None:
    Closing.closed.clear()
    place = Placement(Role.ACTOR_INFER, pool="all", workers=3, replaceable=True)
    with LocalLauncher() as launcher:
        launcher.start(Closing, place).end(1)
    assert sorted(Closing.closed) == [0, 1, 2]


def test_a_worker_that_cannot_be_built_leaves_no_other_open() -> None:
    Closing.closed.clear()
    before = set(threading.enumerate())
    place = Placement(Role.ACTOR_INFER, pool="all", workers=3)
    with LocalLauncher() as launcher:
        with pytest.raises(EngineError, match="cannot be built"):
            launcher.start(Closing, place, 2)
        assert sorted(Closing.closed) == [0, 1]
    assert set(threading.enumerate()) <= before
