"""Replicas that die, break or hang while they move, and their return: real clusters and a real
event loop, scripted engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from roll.config.sections.roles import Role
from roll.config.sections.rollout import HealthConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineDiedError, EngineError, WaitTimeoutError
from roll.core.metrics import Metrics, Sum
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import GenerateRequest, Heartbeat, SamplingParams, WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.colocation import Colocation, Resident
from roll.distributed.local import LocalCluster, LocalLauncher
from roll.distributed.worker import Worker
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.runtime.inference_service import InferenceService
from roll.runtime.replicas import ClusterEngine, Replicas
from roll.workers.infer import InferWorker

LIMITS = HealthConfig(heartbeat_s=0.01, timeout_s=0.5, restart_timeout_s=2, slow_factor=0)


class Device:
    """Who is on it; two at once are noted."""

    def __init__(self) -> None:
        self.on: set[str] = set()
        self.together: list[set[str]] = []

    def enter(self, who: str) -> None:
        self.on.add(who)
        if len(self.on) > 1:
            self.together.append(set(self.on))

    def leave(self, who: str) -> None:
        self.on.discard(who)


class Scripted(InferWorker):
    """Holds its device from its start to its end, but while it sleeps."""

    def __init__(
        self,
        spec: WorkerSpec,
        devices: list[Device],
        plan: dict[int, str],
        starts: Counter[int],
        asked: list[int | None],
    ) -> None:
        Worker.__init__(self, spec)
        self.device, self.plan, self.starts = devices[spec.rank], plan, starts
        self.asked = asked
        self.fault = ""
        self.version: int | None = None
        """Of the trainer's weights that it has."""
        if plan.get(spec.rank) == "cannot be built":
            raise RuntimeError("no port is free")
        if plan.get(spec.rank) == "hangs at start":
            time.sleep(0.3)  # as a process that has to come up first

    @property
    def me(self) -> str:
        return f"replica {self.spec.rank}"

    async def start(self) -> None:
        self.starts[self.spec.rank] += 1
        if self.plan.get(self.spec.rank) == "cannot start":
            self.device.enter(self.me)
            raise EngineError("no memory")
        self.device.enter(self.me)
        if self.plan.get(self.spec.rank) == "hangs at start":
            del self.plan[self.spec.rank]
            await asyncio.sleep(3600)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await self._meet("")
        self.asked.append(self.version)
        return [Completion.of((7,), (0.0,), (0,), FinishReason.STOP)] * request.n

    async def heartbeat(self) -> Heartbeat:
        await self._meet("")
        return Heartbeat(0, 0, 0, {})

    async def sleep(self, drop_weights: bool = False) -> None:
        await self._meet("sleep")
        self.device.leave(self.me)
        if drop_weights:
            self.version = None

    async def wake(self, weights_only: bool = False) -> None:
        self.device.enter(self.me) if not weights_only else None
        await self._meet("wake")

    async def close(self) -> None:
        self.device.leave(self.me)

    async def _meet(self, doing: str) -> None:
        planned = self.plan.get(self.spec.rank, "")
        if doing and planned.endswith(f" at {doing}"):
            self.fault = self.plan.pop(self.spec.rank).partition(" ")[0]
        if self.fault == "dies":
            raise EngineDiedError(f"{self.me} is gone")
        if self.fault == "hangs":
            await asyncio.sleep(3600)


class Pusher:
    """Notes who is pushed to."""

    def __init__(self, infer: LocalCluster[Scripted]) -> None:
        self.infer = infer
        self.pushes: list[list[int]] = []
        self.failures: list[str] = []
        """Of the next pushes."""
        self.fatal = False
        """Whether a push that fails takes its engines with it."""

    def push(self, version: int, ranks: Any, *, verify: bool) -> None:
        self.pushes.append(list(ranks))
        if self.failures:
            for rank in ranks if self.fatal else ():
                self.infer.workers[rank].fault = "dies"
            raise EngineDiedError(self.failures.pop())
        for rank in ranks:
            self.infer.workers[rank].version = version

    def forget(self, rank: int) -> None:
        pass

    def take_metrics(self) -> Metrics:
        return Metrics({"weight_sync/groups_made": Sum(len(self.pushes))})


class Lingering:
    """A cluster some of whose processes do not end when they are killed."""

    def __init__(self, infer: LocalCluster[Scripted]) -> None:
        self._infer = infer
        self.stuck: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._infer, name)

    def end(self, rank: int) -> None:
        if rank in self.stuck:
            raise WaitTimeoutError(f"waited 30 s for the processes of rank {rank}")
        self._infer.end(rank)


class Stage:
    """A trainer and replicas on the same devices."""

    def __init__(
        self, count: int, limits: HealthConfig, loop: LoopThread, *, shared: bool = True
    ) -> None:
        self.devices = [Device() for _ in range(count)]
        self.plan: dict[int, str] = {}
        self.starts: Counter[int] = Counter()
        """Of each rank's engines, so far."""
        self.asked: list[int | None] = []
        """With which weights requests met a living engine; None: not the trainer's."""
        launcher = LocalLauncher(world_size=count, call_timeout_s=3600)
        place = Placement(Role.ACTOR_INFER, pool="all", replaceable=True)
        self.infer: LocalCluster[Scripted] = launcher.start(
            Scripted, place, self.devices, self.plan, self.starts, self.asked
        )
        self.infer.call(Scripted.start)
        for worker in self.infer.workers:
            worker.version = 0
        fleet = Fleet([Replica(i, ClusterEngine(self.infer, i)) for i in range(count)])  # type: ignore[arg-type]
        self.colocation = Colocation(enabled=shared)
        self.ends = Lingering(self.infer)
        replicas = Replicas(self.ends, loop, fleet, limits)  # type: ignore[arg-type]
        self.pusher = Pusher(self.infer)
        self.serving = InferenceService(replicas, self.colocation, self.pusher)  # type: ignore[arg-type]
        own = [frozenset({i}) for i in range(count)]
        self.colocation.add(Role.ACTOR_INFER, *replicas.residents(own))
        everywhere = frozenset(range(count))
        self.colocation.add(
            Role.ACTOR_TRAIN,
            Resident(everywhere, partial(self._train, "enter"), partial(self._train, "leave")),
        )
        self.serving.start()

    def _train(self, how: str) -> None:
        for device in self.devices:
            getattr(device, how)("trainer")

    def turn_of_trainer(self) -> None:
        with self.serving.trainer_busy(), self.colocation.use(Role.ACTOR_TRAIN):
            assert all(device.on == {"trainer"} for device in self.devices)

    def lose(self, index: int) -> None:
        async def lose() -> None:
            self.serving.fleet.replicas[index].lose("given up")

        self.serving.run(lose())

    def generate(self) -> None:
        """One request, from its way through the queue to its end."""
        request = GenerateRequest("r", (1,), SamplingParams(1.0, max_new_tokens=1))
        work = self.serving.fleet.generate(request, session="s", timeout_s=30)
        self.serving.run(work)

    def serving_replicas(self) -> list[int]:
        return [replica.index for replica in self.serving.fleet.replicas if replica.serving]

    def wait_for(self, what: Callable[[], bool], limit_s: float = 10) -> None:
        deadline = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def staged(
    replicas: int = 2, limits: HealthConfig = LIMITS, *, shared: bool = True
) -> Iterator[Stage]:
    with LoopThread("serving") as loop:
        stage = Stage(replicas, limits, loop, shared=shared)
        try:
            yield stage
        finally:
            stage.serving.close()
            stage.infer.close(graceful=False)


@pytest.mark.parametrize(
    "fault", ["dies at sleep", "hangs at sleep", "dies at wake", "hangs at wake"]
)
def test_a_replica_that_breaks_as_it_moves_is_replaced_and_the_run_goes_on(fault: str) -> None:
    with staged() as stage:
        stage.serving.take_devices()
        stage.plan[1] = fault
        begun = time.monotonic()
        stage.turn_of_trainer()
        stage.serving.take_devices()
        assert time.monotonic() - begun < 5
        assert 0 in stage.serving_replicas()
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
        stage.turn_of_trainer()
        stage.serving.take_devices()
        assert stage.serving_replicas() == [0, 1]
        assert [1] in stage.pusher.pushes
        assert [device.together for device in stage.devices] == [[], []]


def test_engines_keep_their_weights_where_no_push_follows() -> None:
    """As for a checkpoint behind a push, and while another replica is replaced."""
    with staged() as stage:
        stage.serving.take_devices()
        with stage.colocation.renewing(Role.ACTOR_INFER):
            stage.turn_of_trainer()
        assert [worker.version for worker in stage.infer.workers] == [None, None]
        with (
            stage.serving.trainer_busy(),
            stage.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
        ):
            stage.serving.update_weights(3, verify=False)
        stage.turn_of_trainer()
        stage.serving.take_devices()
        stage.infer.workers[1].fault = "dies"
        stage.wait_for(lambda: stage.starts == {0: 1, 1: 2})
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
        assert [worker.version for worker in stage.infer.workers] == [3, 3]


def test_a_replica_that_dies_asleep_is_met_when_it_is_called() -> None:
    with staged() as stage:
        stage.turn_of_trainer()
        stage.infer.workers[0].fault = "dies"
        stage.serving.take_devices()
        assert 1 in stage.serving_replicas()
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])


def test_a_revival_waits_for_its_turn_and_has_its_device_alone() -> None:
    with staged(limits=LIMITS.model_copy(update={"restart_timeout_s": 0.5})) as stage:
        stage.serving.take_devices()
        stage.infer.workers[1].fault = "dies"
        with stage.serving.trainer_busy(), stage.colocation.use(Role.ACTOR_TRAIN):
            assert stage.devices[1].on == {"trainer"}
            time.sleep(0.8)  # longer than a start may take
            assert stage.devices[1].on == {"trainer"}
        stage.wait_for(lambda: 1 in stage.serving_replicas())
        assert stage.serving_replicas() == [0, 1]
        assert [device.together for device in stage.devices] == [[], []]


def test_a_replica_that_is_given_up_leaves_its_device() -> None:
    with staged(limits=LIMITS.model_copy(update={"max_restarts": 1})) as stage:
        stage.serving.take_devices()
        stage.plan[1] = "cannot start"
        stage.infer.workers[1].fault = "dies"
        stage.wait_for(lambda: not stage.devices[1].on)
        for _ in range(3):
            stage.turn_of_trainer()
            stage.serving.take_devices()
        assert stage.serving_replicas() == [0]
        assert [device.together for device in stage.devices] == [[], []]


def test_a_revival_whose_push_fails_gives_the_others_their_devices_back() -> None:
    with staged() as stage:
        stage.serving.take_devices()
        stage.pusher.failures.append("the new one is gone again")
        stage.infer.workers[1].fault = "dies"
        stage.wait_for(lambda: len(stage.pusher.pushes) > 1)
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
        assert stage.starts == {0: 1, 1: 3}


def test_nothing_is_generated_with_weights_that_are_not_the_trainers() -> None:
    with staged(replicas=1) as stage:
        stage.serving.take_devices()
        stage.pusher.failures.append("the push broke")
        stage.infer.workers[0].fault = "dies"
        stage.generate()
        assert stage.asked == [0]
        assert stage.starts == {0: 3}
        assert stage.pusher.pushes == [[0], [0]]


@pytest.mark.parametrize("shared", [True, False])
def test_a_start_that_takes_too_long_does_not_disturb_the_next_one(shared: bool) -> None:
    limits = LIMITS.model_copy(update={"restart_timeout_s": 1, "timeout_s": 5})
    with staged(limits=limits, shared=shared) as stage:
        stage.serving.take_devices()
        stage.plan[1] = "hangs at start"
        stage.infer.workers[1].fault = "dies"
        stage.wait_for(lambda: 1 not in stage.serving_replicas())
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
        stage.serving.run(stage.serving.fleet.replicas[1].listen(5))  # it is still there
        assert stage.serving_replicas() == [0, 1]
        assert stage.starts == {0: 1, 1: 3}
        assert [device.together for device in stage.devices] == [[], []]


def test_a_revival_that_fails_in_any_way_gives_the_others_their_devices_back() -> None:
    with staged(limits=LIMITS.model_copy(update={"max_restarts": 1})) as stage:
        stage.serving.take_devices()
        with stage.serving.trainer_busy(), stage.colocation.use(Role.ACTOR_TRAIN):
            stage.plan[1] = "cannot be built"
            stage.lose(1)
        stage.wait_for(lambda: stage.serving_replicas() == [0])
        assert [device.together for device in stage.devices] == [[], []]


@pytest.mark.parametrize("move", ["sleep", "wake"])
def test_a_replica_that_hangs_as_it_is_to_move_is_met_long_before_a_start_would_end(
    move: str,
) -> None:
    limits = LIMITS.model_copy(update={"restart_timeout_s": 60, "heartbeat_s": 30})
    with staged(limits=limits) as stage:
        stage.serving.take_devices()
        if move == "wake":
            stage.turn_of_trainer()
        stage.infer.workers[1].fault = "hangs"
        begun = time.monotonic()
        stage.turn_of_trainer() if move == "sleep" else stage.serving.take_devices()
        assert time.monotonic() - begun < 10
        stage.serving.take_devices()
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])


def test_processes_that_do_not_end_stop_only_who_needs_their_devices() -> None:
    with staged(limits=LIMITS.model_copy(update={"max_restarts": 0})) as stage:
        stage.turn_of_trainer()
        stage.plan[1] = "dies at wake"
        stage.ends.stuck.add(1)
        stage.serving.take_devices()
        assert stage.serving_replicas() == [0]
        with pytest.raises(WaitTimeoutError, match="processes of rank 1"):
            stage.turn_of_trainer()
        stage.ends.stuck.clear()
        stage.turn_of_trainer()
        assert [device.together for device in stage.devices] == [[], []]


def test_an_engine_that_dies_as_it_gets_its_weights_is_replaced_once() -> None:
    with staged() as stage:
        stage.serving.take_devices()
        stage.pusher.failures.append("the new one is gone again")
        stage.pusher.fatal = True
        stage.infer.workers[1].fault = "dies"
        stage.wait_for(lambda: len(stage.pusher.pushes) > 1)
        stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
        for _ in range(3):  # whoever waits for a turn meanwhile gets it
            stage.turn_of_trainer()
            stage.serving.take_devices()
        assert stage.serving_replicas() == [0, 1]
        assert stage.starts == {0: 1, 1: 3}
        assert stage.pusher.pushes == [[1], [1]]


def test_a_replica_that_is_lost_in_a_push_comes_back_and_goes_on_taking_turns() -> None:
    with staged() as stage:
        stage.serving.take_devices()
        with (
            stage.serving.trainer_busy(),
            stage.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
        ):
            stage.infer.workers[0].fault = "dies"
            stage.pusher.failures.append("replica 0 is gone")
            stage.serving.update_weights(1, verify=False)
        for _ in range(3):
            stage.serving.take_devices()
            stage.wait_for(lambda: stage.serving_replicas() == [0, 1])
            with (
                stage.serving.trainer_busy(),
                stage.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
            ):
                stage.serving.update_weights(2, verify=False)


def test_the_metrics_of_pushes_are_those_of_the_pusher_if_there_is_one() -> None:
    with staged() as stage:
        stage.serving.take_devices()
        with (
            stage.serving.trainer_busy(),
            stage.colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER),
        ):
            stage.serving.update_weights(1, verify=False)
        found = stage.serving.take_push_metrics().values_by_name()
        assert found == {"weight_sync/groups_made": 1}
        stage.serving.pusher = None
        assert not stage.serving.take_push_metrics()


def test_replicas_move_all_at_once() -> None:
    """A barrier that opens only when all are there; one after the other would never pass it."""
    barrier = threading.Barrier(8, timeout=10)

    def move() -> None:
        barrier.wait()

    colocation = Colocation(enabled=True)
    parts = [Resident(frozenset({i}), move, move, move) for i in range(8)]
    colocation.add(Role.ACTOR_INFER, *parts[:0])
    for number, part in enumerate(parts):
        colocation.residents[f"{Role.ACTOR_INFER}/{number}"] = part
    nothing = lambda: None  # noqa: E731
    everywhere = frozenset(range(8))
    colocation.residents[f"{Role.ACTOR_TRAIN}/0"] = Resident(everywhere, nothing, nothing)
    for use in (Role.ACTOR_INFER, Role.ACTOR_TRAIN):
        with colocation.use(use):
            pass
    with colocation.push(Role.ACTOR_TRAIN, Role.ACTOR_INFER):
        pass
    assert len(colocation.holding_weights) == 8


def test_restarts_do_not_keep_a_push_from_its_thread() -> None:
    with LoopThread("serving") as loop:
        stage = Stage(2, LIMITS, loop)
        gate = threading.Event()

        async def occupy() -> None:
            """As a fleet of restarts and whatever else takes the loop's own threads."""
            running = asyncio.get_running_loop()
            for _ in range(64):
                running.run_in_executor(None, gate.wait, 20)

        try:
            loop.run(occupy())
            begun = time.monotonic()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(stage.serving.update_weights, 1, verify=False).result(10)
            assert time.monotonic() - begun < 5
            assert stage.pusher.pushes == [[0, 1]]
        finally:
            gate.set()
            stage.serving.close()
            stage.infer.close(graceful=False)
