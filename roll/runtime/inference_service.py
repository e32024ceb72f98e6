"""`InferenceService`: a run's replicas, on an event loop of their own, and their upkeep.

The driver's thread trains and pushes; the loop's thread generates. A replica that is lost is
revived from the loop, with help of a thread; the push that this takes waits until the trainer is
free (`trainer_busy`), because weights in the middle of a step are of no version. Where others may
be on the replica's devices, its start waits for the same turn.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.config.sections.roles import Role
from roll.core.errors import WorkerLostError
from roll.core.fair_lock import FairLock
from roll.core.own_thread import in_own_thread
from roll.distributed.colocation import Colocation, part_name
from roll.distributed.worker import Worker
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.health import Health
from roll.rollout.fleet.replica import Replica
from roll.runtime.replicas import Replicas
from roll.runtime.weight_pusher import WeightPusher
from roll.workers.infer import InferWorker

T = TypeVar("T")

MIN_START_S = 1.0
"""Least time for a new engine to load its model, however long its process took to start."""


@dataclass(eq=False)
class InferenceService:
    """Everything that generates, for the driver's thread."""

    replicas: Replicas
    colocation: Colocation
    pusher: WeightPusher
    _health: Health = field(init=False, repr=False)
    _trainer_lock: FairLock = field(default_factory=FairLock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.infer = self.replicas.infer
        self.limits = self.replicas.limits
        self._health = Health(self.fleet, self.limits, self._restart, self._rejoin, self._retire)

    @property
    def fleet(self) -> Fleet:
        """The fleet of all replicas."""
        return self.replicas.fleet

    def start(self) -> None:
        """Begin to listen for heartbeats."""
        self.run(self._start())

    def close(self) -> None:
        """Stop listening; nobody is revived any more."""
        self.run(self._health.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the fleet's loop and wait for it."""
        return self.replicas.run(work)

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

    async def _start(self) -> None:
        self._health.start()

    def _push(self, version: int, indices: Sequence[int], verify: bool) -> None:
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
            replica.reset_for_new_engine()
            await in_own_thread(self._bring_weights, index, self.fleet.version)
            replica.mark_weights_complete()
            self.fleet.join([index])

    async def _retire(self, replica: Replica) -> None:
        await in_own_thread(self.infer.end, replica.index)

    def _shares(self, index: int) -> bool:
        return self.colocation.shares(part_name(Role.ACTOR_INFER, index))

    def _start_anew(self, index: int) -> None:
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
