"""Workers of `actor_infer` as replicas of a fleet, and as residents of shared devices."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import parse_devices
from roll.config.sections.rollout import HealthConfig
from roll.config.sections.training import InferRole
from roll.core.completion import Completion
from roll.core.errors import EngineError, WaitTimeoutError, WorkerLostError
from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.told_wait import told_wait
from roll.core.types import GenerateRequest, Heartbeat
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Resident
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import LeastLoaded, RoutingPolicy, Sticky
from roll.workers.infer import InferWorker

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterEngine:
    """Engine of one replica: passes each call to one worker of `actor_infer`."""

    cluster: Cluster[InferWorker]
    rank: int

    def generate(self, request: GenerateRequest) -> Awaitable[list[Completion]]:
        """Start a request in the worker; see `Engine.generate`."""
        return self.cluster.ask(self.rank, InferWorker.generate, request)

    async def abort(self, request_id: str) -> None:
        """End a running request in the worker; ignore an unknown id."""
        await self.cluster.ask(self.rank, InferWorker.abort, request_id)

    async def heartbeat(self) -> Heartbeat:
        """Return the worker's answer to a heartbeat: token counts and new pieces."""
        return await self.cluster.ask(self.rank, InferWorker.heartbeat)


def build_fleet(config: RlvrBase, infer: Cluster[InferWorker]) -> Fleet:
    """Return a fleet with one replica per rank of `infer`, with the configured routing."""
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


def devices_of_replicas(pool: str, size: int) -> list[frozenset[int]]:
    """Return the devices of each engine: consecutive devices of a pool, in the order of the
    ranks.

    Args:
        pool: devices of the pool, as in the config.
        size: number of devices of an engine.
    """
    devices = parse_devices(pool)
    return [frozenset(devices[i : i + size]) for i in range(0, len(devices), size)]


@dataclass(frozen=True)
class Replicas:
    """All replicas of a run, and their moves onto and off their devices.

    The driver's threads call these methods. A replica that moves off its devices hands its running
    requests over to other replicas. After it has moved back, it takes new requests.
    """

    infer: Cluster[InferWorker]
    loop: LoopThread
    fleet: Fleet
    """Fleet of the replicas; its methods must run on `loop`."""
    limits: HealthConfig

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fleet's event loop, wait, and return its result."""
        return self.loop.run(work)

    def residents(self, devices: Sequence[frozenset[int]]) -> list[Resident]:
        """Return the replicas as residents of their devices, given in the order of the ranks."""
        return [
            Resident(
                own,
                onload=partial(self._enter, index),
                offload=partial(self._leave, index),
                onload_weights=partial(self._wake_weights, index),
                drop=partial(self._leave, index, drop_weights=True),
                exists=partial(self._exists, index),
            )
            for index, own in enumerate(devices)
        ]

    def _exists(self, index: int) -> bool:
        """Return whether the replica is not lost."""
        return not self.fleet.replicas[index].gone

    def _enter(self, index: int) -> None:
        """Wake a replica's engine and let it take requests, unless the replica is lost."""
        with self._losing(index):
            if self._answers(index):
                self._call(index, InferWorker.wake)
                self.run(self._join(index))

    def _wake_weights(self, index: int) -> None:
        """Move only the weights of a replica onto its devices, unless the replica is lost."""
        with self._losing(index):
            if self._answers(index):
                self._call(index, InferWorker.wake, weights_only=True)

    def _leave(self, index: int, *, drop_weights: bool = False) -> None:
        """Hand a replica's requests over and put its engine to sleep; end its worker if it is lost
        by then. `drop_weights` is that of `InferenceStrategy.sleep`."""
        if self._exists(index):
            with self._losing(index):
                if self._answers(index):
                    self.run(self.fleet.leave([index]))
                if self._exists(index):  # it may have been lost while it handed its requests over
                    self._call(index, InferWorker.sleep, drop_weights=drop_weights)
        if not self._exists(index):  # lost before this call or during it
            self.infer.end(index)

    def _answers(self, index: int) -> bool:
        """Ask the replica for a heartbeat, and return whether it is alive.

        Without an answer in time the replica counts as lost. The check is needed here, because
        replicas off their devices are not asked for heartbeats, and a move has a long time limit.
        """
        self.run(self._listen(index))
        return self._exists(index)

    async def _listen(self, index: int) -> None:
        """Ask the replica for a heartbeat, on the event loop; it is lost without one in time."""
        await self.fleet.replicas[index].listen(self.limits.timeout_s)

    @contextmanager
    def _losing(self, index: int) -> Iterator[None]:
        """Turn a failure inside the block (the replica dies, raises EngineError or hangs) into the
        loss of this replica. Its process is ended, so that its devices are free, and the run goes
        on with the other replicas."""
        try:
            yield
        except (WorkerLostError, EngineError, WaitTimeoutError) as error:
            self.run(self._lose(index, f"while it moved on or off its devices: {error}"))
            try:
                self.infer.end(index)
            except WaitTimeoutError as lingering:  # the next role that needs the devices retries
                logger.error("inference replica %d keeps its devices: %s", index, lingering)

    async def _lose(self, index: int, reason: str) -> None:
        """Mark the replica as lost, on the event loop."""
        self.fleet.replicas[index].lose(reason)

    def _call(
        self,
        index: int,
        method: Callable[Concatenate[InferWorker, P], Coroutine[Any, Any, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run a worker's method and wait for it, at most `restart_timeout_s`: in that time a new
        engine could be started instead."""
        pending = self.infer.on([index]).submit(method, *args, **kwargs)
        pending.result(self.limits.restart_timeout_s)

    async def _join(self, index: int) -> None:
        """Let the replica take requests, on the event loop."""
        self.fleet.join([index])


def start_replicas(
    launcher: Launcher,
    loop: LoopThread,
    place: Placement,
    engine: InferRole,
    model: ModelConfig,
    max_tokens: int,
    *,
    health: HealthConfig,
    routing: RoutingPolicy,
    start_timeout_s: float,
) -> Replicas:
    """Start engines beside those of the policy, or without a trainer, and wait until they have
    loaded their model.

    Args:
        place: their pool and name.
        engine: settings of each.
        model: its model.
        max_tokens: largest number of tokens of a request and its answer.
        health: rules for replacing engines.
        routing: choice of the engine for a request.
        start_timeout_s: time limit for the engines to load, in seconds.
    """
    infer = launcher.start(InferWorker, place, engine, model, max_tokens)
    with told_wait(f"the engines of {infer.name} to load their model"):
        infer.submit(InferWorker.start).result(start_timeout_s)
    fleet = Fleet(
        [
            Replica(rank, ClusterEngine(infer, rank), capacity=engine.capacity)
            for rank in range(infer.world_size)
        ],
        routing,
        answer_s=health.timeout_s,
    )
    return Replicas(infer, loop, fleet, health)
