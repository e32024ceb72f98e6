"""The workers of `actor_infer` as replicas: behind one fleet, and as residents of their devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from roll.config.rlvr import RlvrConfig
from roll.config.sections.rollout import HealthConfig
from roll.core.errors import EngineError, WaitTimeoutError, WorkerLostError
from roll.core.loop_thread import LoopThread
from roll.core.types import Completion, GenerateRequest, Heartbeat
from roll.distributed.cluster import Cluster
from roll.distributed.colocation import Resident
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import LeastLoaded, Sticky
from roll.workers.infer import InferWorker

T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Replicas:
    """All replicas of a run, for the driver's thread: who comes on its devices and who leaves.

    A replica that makes room hands its requests over; one that comes back takes new ones.
    """

    infer: Cluster[InferWorker]
    loop: LoopThread
    fleet: Fleet
    """Lives on `loop`."""
    limits: HealthConfig

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the fleet's loop and wait for it."""
        return self.loop.run(work)

    def residents(self, devices: Sequence[frozenset[int]]) -> list[Resident]:
        """Return the replicas as residents of their devices.

        Args:
            devices: the devices of each replica, in the order of their ranks.
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
