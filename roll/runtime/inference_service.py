"""`InferenceService`: the replicas of a run on their own event loop, and the repair of lost ones.

The driver's main thread trains and pushes weights; the event loop's thread generates. A lost
replica is restarted from the event loop, with blocking calls in extra threads. The replica then
needs a push of weights. This push waits until the trainer is free (`trainer_busy`), because in the
middle of a training step the weights belong to no version. If other roles may be on the replica's
devices, the start of the new engine waits for the trainer too.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roll.config.sections.roles import Role
from roll.core.metrics import Metrics
from roll.core.threads.fair_lock import FairLock
from roll.core.threads.own_thread import in_own_thread
from roll.distributed.colocation import Colocation, part_name
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.health import Health
from roll.rollout.fleet.replica import Replica
from roll.runtime.replicas import Replicas
from roll.runtime.weight_pusher import WeightPusher
from roll.workers.infer import InferWorker

T = TypeVar("T")

MIN_START_S = 1.0
"""Shortest time limit for a new engine to load its model, in seconds. It applies if the start of
the process has used up the time limit of the restart."""


@dataclass(eq=False)
class InferenceService:
    """All replicas of a run, as the driver's main thread sees them."""

    replicas: Replicas
    colocation: Colocation
    pusher: WeightPusher | None
    """Pusher of the trainer's weights; None if the engines keep those of their files, as judges
    do."""
    role: str = Role.ACTOR_INFER
    """Name of the replicas among the residents of devices."""
    trainer_lock: FairLock = field(default_factory=FairLock, repr=False)
    """Lock of all that move roles onto devices, or push weights."""
    _health: Health = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.infer = self.replicas.infer
        self.limits = self.replicas.limits
        self._health = Health(self.fleet, self.limits, self._restart, self._rejoin, self._retire)

    @property
    def fleet(self) -> Fleet:
        """Fleet of all replicas; its methods must run on the event loop, through `run`."""
        return self.replicas.fleet

    def start(self) -> None:
        """Start to ask the replicas for heartbeats, and to restart those that are lost."""
        self.run(self._start())

    def close(self) -> None:
        """Stop asking for heartbeats; lost replicas are not restarted any more."""
        self.run(self._health.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fleet's event loop, wait, and return its result."""
        return self.replicas.run(work)

    @contextmanager
    def trainer_busy(self) -> Iterator[None]:
        """Make restarted replicas wait inside the block: they get no weights, and move no other
        role off the devices.

        Entering the block waits for a replica that is doing so just now.
        """
        with self.trainer_lock.held():
            yield

    def take_devices(self) -> None:
        """Move the replicas onto their devices, after a wait as in `trainer_busy`. They stay there
        until another role needs the devices."""
        with self.trainer_lock.held(), self.colocation.use(Role.ACTOR_INFER):
            return

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Push the trainer's weights to all replicas that are not lost. Call this method inside
        `trainer_busy`.

        Args:
            version: version of these weights, which later tokens carry.
            verify: check the received weights by their checksum.

        Raises:
            RollError: the push failed although no replica was lost; see `WeightPusher.push`.
        """

        pusher = self.pusher
        assert pusher is not None, "only the policy's engines get weights"

        async def push(indices: Sequence[int]) -> None:
            await in_own_thread(pusher.push, version, indices, verify=verify)

        self.run(self.fleet.update_weights(version, push))

    def take_push_metrics(self) -> Metrics:
        """Return the metrics of the pushes since the last call; see `WeightPusher.take_metrics`."""
        return Metrics() if self.pusher is None else self.pusher.take_metrics()

    async def _start(self) -> None:
        """Start the monitor of the replicas, on the event loop."""
        self._health.start()

    async def _restart(self, replica: Replica) -> None:
        """Replace a lost engine by a new one; only end it if other roles may be on its devices."""
        if self._shares(replica.index):  # `_rejoin` starts the new engine, when devices are free
            await in_own_thread(self.infer.end, replica.index)
        else:
            await in_own_thread(self._start_anew, replica.index)

    async def _rejoin(self, replica: Replica) -> None:
        """Wait for the trainer, push its weights to a restarted replica, and let it serve. One that
        gets no weights, and has its devices for itself, need not wait."""
        index = replica.index
        if self.pusher is None and not self._shares(index):
            replica.reset_for_new_engine()
            self._serve(replica)
            return
        async with self.trainer_lock.awaited():
            if self._shares(index):
                await in_own_thread(self._start_on_shared, index)
            replica.reset_for_new_engine()
            if self.pusher is None:
                await in_own_thread(self._bring_back)
            else:
                await in_own_thread(self._bring_weights, index, self.fleet.version)
            self._serve(replica)

    def _serve(self, replica: Replica) -> None:
        """Let a replica with a new engine, which has its weights, take requests."""
        replica.mark_weights_complete()
        self.fleet.join([replica.index])

    async def _retire(self, replica: Replica) -> None:
        """End a replica for good, which frees its devices."""
        await in_own_thread(self.infer.end, replica.index)

    def _shares(self, index: int) -> bool:
        """Return whether other roles may be on the devices of this replica."""
        return self.colocation.shares(part_name(self.role, index))

    def _start_anew(self, index: int) -> None:
        """Replace the worker of a replica and start its engine, within the limit of restarts.

        Its next push sends all tensors. If the engine fails to start, the new worker is ended.
        """
        if self.pusher is not None:
            self.pusher.forget(index)
        deadline = time.monotonic() + self.limits.restart_timeout_s
        self.infer.restart(index, self.limits.restart_timeout_s)
        try:
            pending = self.infer.on([index]).submit(InferWorker.start)
            pending.result(max(MIN_START_S, deadline - time.monotonic()))
        except BaseException:
            self.infer.end(index)  # frees the memory that the engine holds on its devices
            raise

    def _start_on_shared(self, index: int) -> None:
        """Do `_start_anew` while no other role is on the replica's devices.

        Others that left them come back after a failure; else `_bring_weights` brings them back.
        """
        try:
            with self.colocation.starting(part_name(self.role, index)):
                self._start_anew(index)
        except BaseException:
            self._bring_back()
            raise

    def _bring_weights(self, index: int, version: int) -> None:
        """Push the weights to one replica, unverified, with trainer and replica on their devices.

        Afterwards, also after a failure, all living replicas go back onto their devices, and the
        trainer off those.
        """
        try:
            assert self.pusher is not None
            with self.colocation.push(Role.ACTOR_TRAIN, part_name(self.role, index)):
                self.pusher.push(version, [index], verify=False)
        finally:
            self._bring_back()

    def _bring_back(self) -> None:
        """Move the other living replicas back onto the devices that they left for a restart or for
        the push after it, and other roles off these. This is also done after a failure, because
        nothing else would move them back."""
        with self.colocation.use(Role.ACTOR_INFER):
            return
