"""`InferenceService`: a run's replicas, on an event loop of their own, and their upkeep.

The driver's thread trains and pushes; the loop's thread generates. A replica that is lost is
revived from the loop, with help of a thread; the push that this takes waits until the trainer is
free (`trainer_busy`), because weights in the middle of a step are of no version. Where others may
be on the replica's devices, its start waits for the same turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.config.rlvr import RlvrConfig
from roll.config.sections.roles import Role
from roll.config.sections.rollout import HealthConfig
from roll.core.errors import EngineError, WaitTimeoutError, WorkerLostError
from roll.core.fair_lock import FairLock
from roll.core.loop_thread import LoopThread
from roll.core.own_thread import in_own_thread
from roll.core.types import Completion, GenerateRequest, Heartbeat
from roll.distributed.cluster import Cluster
from roll.distributed.colocation import Colocation, Resident, part_name
from roll.distributed.worker import Worker
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.health import Health
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import LeastLoaded, Sticky
from roll.runtime.weight_pusher import WeightPusher
from roll.workers.infer import InferWorker

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)

MIN_START_S = 1.0
"""For a new engine to load its model, however long its process took to come up."""


@dataclass(frozen=True, slots=True)
class ClusterEngine:
    """One worker of `actor_infer` as a replica's engine."""

    cluster: Cluster[InferWorker]
    rank: int

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return await self.cluster.ask(self.rank, InferWorker.generate, request)

    async def abort(self, request_id: str) -> None:
        await self.cluster.ask(self.rank, InferWorker.abort, request_id)

    async def heartbeat(self) -> Heartbeat:
        return await self.cluster.ask(self.rank, InferWorker.heartbeat)


@dataclass(eq=False)
class InferenceService:
    """Everything that generates, for the driver's thread."""

    infer: Cluster[InferWorker]
    loop: LoopThread
    fleet: Fleet
    colocation: Colocation
    limits: HealthConfig
    pusher: WeightPusher | None = field(default=None, init=False)
    """Set once there is a trainer to push from."""
    _health: Health = field(init=False, repr=False)
    _trainer_lock: FairLock = field(default_factory=FairLock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._health = Health(self.fleet, self.limits, self._restart, self._rejoin, self._retire)

    def start(self) -> None:
        """Begin to listen for heartbeats."""
        self.run(self._start())

    def close(self) -> None:
        """Stop listening; nobody is revived any more."""
        self.run(self._health.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the fleet's loop and wait for it."""
        return self.loop.run(work)

    @contextmanager
    def trainer_busy(self) -> Iterator[None]:
        """Keep revived replicas from asking for weights, and from moving others off the devices,
        inside the block."""
        with self._trainer_lock.held():
            yield

    def take_devices(self) -> None:
        """Have the replicas on their devices until somebody else is."""
        with self._trainer_lock.held(), self.colocation.use(Role.ACTOR_INFER):
            return

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Weights of `version` to all replicas; inside `trainer_busy`."""

        async def push(indices: Sequence[int]) -> None:
            await in_own_thread(self._push, version, indices, verify)

        self.run(self.fleet.update_weights(version, push))

    def memory_gb(self) -> list[float]:
        """Resident memory of each replica that lives, GiB, its children included."""
        living = [replica.index for replica in self.fleet.replicas if not replica.gone]
        try:
            return self.infer.on(living).call_each(Worker.memory_gb) if living else []
        except WorkerLostError:  # just now; the next record has the others'
            return []

    def residents(self, devices: Sequence[frozenset[int]]) -> list[Resident]:
        """The replicas as residents of their devices: one that makes room hands its requests over,
        one that comes back takes new ones.

        Args:
            devices: of each replica.
        """
        return [
            Resident(
                own,
                onload=partial(self._enter, index),
                offload=partial(self._leave, index),
                onload_weights=partial(self._wake_weights, index),
                exists=partial(self._exists, index),
            )
            for index, own in enumerate(devices)
        ]

    async def _start(self) -> None:
        self._health.start()

    def _exists(self, index: int) -> bool:
        return not self.fleet.replicas[index].gone

    def _enter(self, index: int) -> None:
        with self._losing(index):
            if self._answers(index):
                self._call(index, InferWorker.wake)
                self.run(self._join(index))

    def _wake_weights(self, index: int) -> None:
        with self._losing(index):
            if self._answers(index):
                self._call(index, InferWorker.wake, weights_only=True)

    def _leave(self, index: int) -> None:
        if self._exists(index):
            with self._losing(index):
                if self._answers(index):
                    self.run(self.fleet.leave([index]))
                if self._exists(index):  # it may have been lost as it handed its requests over
                    self._call(index, InferWorker.sleep)
        if not self._exists(index):  # also where it was lost in between, or before
            self.infer.end(index)

    def _answers(self, index: int) -> bool:
        """Whether it lives. One that hangs is lost here: nobody hears of it while it is away, and a
        move of an engine may take long."""
        self.run(self._listen(index))
        return self._exists(index)

    async def _listen(self, index: int) -> None:
        await self.fleet.replicas[index].listen(self.limits.timeout_s)

    @contextmanager
    def _losing(self, index: int) -> Iterator[None]:
        """A replica that dies, breaks or hangs inside the block is lost, with its devices free; the
        run goes on with the others."""
        try:
            yield
        except (WorkerLostError, EngineError, WaitTimeoutError) as error:
            self.run(self._lose(index, f"while it moved on or off its devices: {error}"))
            try:
                self.infer.end(index)
            except WaitTimeoutError as lingering:  # whoever needs its devices tries again
                logger.error("inference replica %d keeps its devices: %s", index, lingering)

    async def _lose(self, index: int, reason: str) -> None:
        self.fleet.replicas[index].lose(reason)

    def _call(
        self,
        index: int,
        method: Callable[Concatenate[InferWorker, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Longer than a new engine takes, nobody waits for an old one."""
        pending = self.infer.on([index]).submit(method, *args, **kwargs)
        pending.result(self.limits.restart_timeout_s)

    async def _join(self, index: int) -> None:
        self.fleet.join([index])

    def _push(self, version: int, indices: Sequence[int], verify: bool) -> None:
        assert self.pusher is not None
        self.pusher.push(version, indices, verify=verify)

    async def _restart(self, replica: Replica) -> None:
        if self._shares(replica.index):  # its start waits for its turn, in `_rejoin`
            await in_own_thread(self.infer.end, replica.index)
        else:
            await in_own_thread(self._start_anew, replica.index)

    async def _rejoin(self, replica: Replica) -> None:
        index = replica.index
        async with self._trainer_lock.awaited():
            if self._shares(index):
                await in_own_thread(self._start_on_shared, index)
            replica.renewed()
            await in_own_thread(self._bring_weights, index, self.fleet.version)
            replica.mend()
            self.fleet.join([index])

    async def _retire(self, replica: Replica) -> None:
        await in_own_thread(self.infer.end, replica.index)

    def _shares(self, index: int) -> bool:
        return self.colocation.shares(part_name(Role.ACTOR_INFER, index))

    def _start_anew(self, index: int) -> None:
        if self.pusher is not None:
            self.pusher.forget(index)
        deadline = time.monotonic() + self.limits.restart_timeout_s
        self.infer.restart(index, self.limits.restart_timeout_s)
        try:
            pending = self.infer.on([index]).submit(InferWorker.start)
            pending.result(max(MIN_START_S, deadline - time.monotonic()))
        except BaseException:
            self.infer.end(index)  # what it has on its devices
            raise

    def _start_on_shared(self, index: int) -> None:
        try:
            with self.colocation.starting(part_name(Role.ACTOR_INFER, index)):
                self._start_anew(index)
        except BaseException:
            self._bring_back()
            raise

    def _bring_weights(self, index: int, version: int) -> None:
        try:
            with self.colocation.push(Role.ACTOR_TRAIN, part_name(Role.ACTOR_INFER, index)):
                self._push(version, [index], False)
        finally:
            self._bring_back()

    def _bring_back(self) -> None:
        """Whoever made room, also for a revival that failed: nobody else would."""
        with self.colocation.use(Role.ACTOR_INFER):
            return


def build_fleet(config: RlvrConfig, infer: Cluster[InferWorker]) -> Fleet:
    """All replicas of the cluster, routed as configured."""
    rollout = config.rollout
    return Fleet(
        [
            Replica(
                rank,
                ClusterEngine(infer, rank),
                capacity=config.actor_infer.capacity,
                queue=rollout.queue_per_replica,
            )
            for rank in range(infer.world_size)
        ],
        Sticky() if rollout.routing == "sticky" else LeastLoaded(),
        continue_in_flight=rollout.in_flight == "continue",
        answer_s=rollout.health.timeout_s,
    )
