"""`RayCluster`: the workers of one role, each in its own Ray actor."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Generic

import ray

from roll.core.batch import Batch
from roll.core.errors import WaitTimeoutError, WorkerLostError
from roll.core.threads.told_wait import told_wait
from roll.core.types import RankInfo, WorkerPart, WorkerSpec, worker_name
from roll.distributed.cluster import Cluster, W, ranks_name
from roll.distributed.dispatch import Apart, Call
from roll.distributed.on_ray.actor import (
    END_TIMEOUT_S,
    ActorSettings,
    JobDevice,
    RayActor,
    WorkerRecipe,
    cores_of,
    start_parts,
)
from roll.distributed.on_ray.answers import RayAnswers
from roll.distributed.on_ray.bundles import BundledCalls
from roll.distributed.on_ray.host import HostInfo
from roll.distributed.watchdog import Watchdog

LOGGER = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 20.0


class RayCluster(Cluster[W], Generic[W]):
    """A cluster whose workers run in Ray actors.

    The list of actors changes only when a rank is restarted, and then one entry is replaced. So a
    call from another thread reaches either the old actor or the new one.
    """

    def __init__(
        self,
        recipe: WorkerRecipe,
        slots: Sequence[tuple[JobDevice, ...]],
        settings: ActorSettings,
        watchdog: Watchdog,
    ) -> None:
        """Start the actors and build their workers. The errors are those of `Launcher.start`.

        Args:
            slots: devices of each worker, by rank; of several nodes only if the class of the
                workers has a `follower`.
        """
        place = recipe.placement
        super().__init__(place.role, [], settings.call_timeout_s, place.label)
        self._recipe = recipe
        self._slots = slots
        self._settings = settings
        self._watchdog = watchdog
        self._specs: list[WorkerSpec] = []
        self._lock = threading.Lock()
        self._closed = False
        self._restarts = [threading.Lock() for _ in slots]
        self._arriving: set[RayActor] = set()
        """New actors of ranks that are being restarted, until they enter the list of actors."""
        self._actors = [
            start_parts(recipe, rank, own, settings) for rank, own in enumerate(self._slots)
        ]
        try:
            name = ranks_name(worker_name(place.role, place.label), range(len(slots)))
            with told_wait(f"{name} to start"):
                self._build()
        except BaseException:
            self.close(graceful=False)
            raise

    @property
    def infos(self) -> tuple[HostInfo, ...]:
        """Process and node of each rank's actor."""
        return tuple(actor.info for actor in self._actors)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(a.member.rank for a in self._actors if a.member.death is not None)

    def _build(self) -> None:
        """Build a worker in each actor within one `start_timeout_s`; the first actor picks the port
        of the rendezvous."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        self._arrive(self._actors, deadline)
        first = self._actors[0]
        port = self._wait("free_port", [first], [first.free_port()], deadline)[0]
        self._specs = [self._spec(rank, port) for rank in range(len(self._actors))]
        self.ranks = tuple(self._construct(self._actors, deadline))

    def _construct(self, actors: Sequence[RayActor], deadline: float) -> list[RankInfo]:
        """Build the workers of these actors, and their parts on other nodes, which then follow.
        Return the rank of each worker. The parts of a worker meet at a new port each time."""
        spread = [actor for actor in actors if actor.followers]
        free = [actor.free_port() for actor in spread]
        ports = self._wait("free_port", spread, free, deadline) if spread else []
        for actor, port in zip(spread, ports, strict=True):
            rank = actor.member.rank
            meet = f"{actor.info.address}:{port}"
            self._specs[rank] = replace(
                self._specs[rank],
                rendezvous=meet,
                parts=tuple(
                    WorkerPart(
                        part.own[0].node, part.info.address, tuple(d.device for d in part.own)
                    )
                    for part in actor.parts
                ),
            )
        refs = [actor.build(self._specs[actor.member.rank]) for actor in actors]
        followers = [follower for actor in actors for follower in actor.followers]
        later = [follower.build(self._follower_spec(follower)) for follower in followers]
        infos = self._wait("__init__", actors, refs, deadline)
        if followers:
            self._wait("__init__", followers, later, deadline)
        for follower in followers:
            follower.follow(self._watchdog)
        return infos

    def _follower_spec(self, follower: RayActor) -> WorkerSpec:
        """Return the spec of a further part of a worker, whose own spec is complete."""
        member = follower.member
        return replace(
            self._specs[member.rank],
            part=member.part,
            devices=tuple(slot.device for slot in follower.own),
            cores=cores_of(follower.own),
            node=follower.own[0].node,
            host=follower.info.address,
        )

    def _spec(self, rank: int, port: int) -> WorkerSpec:
        """Return the spec of one rank; all ranks meet at the host of rank 0, or at 127.0.0.1 on a
        single node."""
        place, own = self._recipe.placement, self._actors[rank].own
        hosts = [
            "127.0.0.1" if self._settings.single_node else self._actors[each].info.address
            for each in (0, rank)
        ]
        return WorkerSpec(
            role=place.role,
            rank=rank,
            world_size=len(self._slots),
            devices=tuple(slot.device for slot in own),
            cores=cores_of(own),
            node=own[0].node,
            rendezvous=f"{hosts[0]}:{port}",
            seed=place.seed,
            platform=self._settings.platform,
            host=hosts[1],
            label=place.label,
        )

    def _arrive(self, actors: Sequence[RayActor], deadline: float) -> None:
        """Wait until the actors have started, with all parts; the watchdog then watches them.

        Args:
            deadline: reading of `time.monotonic`.
        """
        parts = [part for actor in actors for part in actor.parts]
        infos = self._wait("start", parts, [part.about() for part in parts], deadline)
        for part, info in zip(parts, infos, strict=True):
            part.arrive(info, self._watchdog)

    def _wait(
        self, method: str, actors: Sequence[RayActor], refs: list[Any], deadline: float
    ) -> list[Any]:
        """Return the results of `refs`, one per actor, in order. The errors are those of
        `Answers.collect`.

        Args:
            method: name of the method, for messages.
            deadline: reading of `time.monotonic` up to which to wait, but 0.1 s at least.
        """
        left_s = max(deadline - time.monotonic(), 0.1)
        return self._answers(method, actors, refs).collect(left_s)

    def restart(self, rank: int, timeout_s: float | None = None) -> None:
        if not self._recipe.placement.replaceable:
            raise ValueError(f"{self.name}: only workers that are replaceable can be restarted")
        with self._restarts[rank]:
            old = self._actors[rank]
            self._require_open(old)
            self._end(old, "to be restarted")
            with self._lock:
                self._require_open(old)
                new = start_parts(self._recipe, rank, self._slots[rank], self._settings)
                self._arriving.add(new)
            limit_s = self._settings.start_timeout_s
            try:
                deadline = time.monotonic() + min(limit_s, timeout_s or limit_s)
                self._arrive([new], deadline)
                self._construct([new], deadline)
                self._actors[rank] = new
            except BaseException:
                self._watchdog.forget(new.member.parts)
                self._end_failed(new)
                raise
            finally:
                with self._lock:
                    self._arriving.discard(new)

    def _end_failed(self, actor: RayActor) -> None:
        """Kill an actor whose worker could not be built, and free its devices. If it does not end,
        only log an error: the caller raises the error of the failed start."""
        if self._closed:  # `close` ends new actors, too
            for part in actor.parts:
                part.kill()
            return
        try:
            gone = self._end_parts(actor)
        except ray.exceptions.RayError as error:
            LOGGER.error("%s could not be ended after a failed start: %s", actor.member.name, error)
            return
        if not gone:
            LOGGER.error(
                "%s is still there %g s after it was killed for a failed start; it keeps its "
                "devices",
                actor.member.name,
                END_TIMEOUT_S,
            )

    def end(self, rank: int) -> None:
        if not self._recipe.placement.replaceable:
            raise ValueError(f"{self.name}: only workers that are replaceable can be ended alone")
        with self._restarts[rank]:
            if not self._closed:
                self._end(self._actors[rank], "and is not needed any more")

    def _end(self, actor: RayActor, why: str) -> None:
        """Kill all processes of an actor and wait for their end.

        Args:
            why: end of the sentence that calls to this actor give as the reason.

        Raises:
            WaitTimeoutError: a process has not ended in time.
        """
        if actor.ended:
            return
        name = f"{actor.member.name} (pid {actor.info.pid}"
        self._watchdog.give_up(actor.member, f"{name}) was ended, {why}")
        if not self._end_parts(actor):
            raise WaitTimeoutError(
                f"waited {END_TIMEOUT_S:g} s for the processes of {name}, node "
                f"{actor.info.address}) to end after they were killed"
            )
        actor.ended = True

    def _end_parts(self, actor: RayActor) -> bool:
        """Kill all processes of an actor and of its other parts, which end meanwhile; return
        whether all have ended in time."""
        for part in actor.followers:
            part.kill()
        gone = [part.end(self._settings.start_timeout_s) for part in actor.parts]
        return all(gone)

    def _require_open(self, actor: RayActor) -> None:
        """Raise an error about this actor, from `Member.error`, if the cluster has been closed."""
        if self._closed:
            name = actor.member.name
            raise actor.member.error(f"{name} is not restarted: its cluster is closed")

    def close(self, *, graceful: bool = True) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            first = [*self._actors, *self._arriving]
            actors = [part for actor in first for part in actor.parts]
        self._watchdog.forget(actor.member for actor in actors)
        try:
            if graceful and not self._watchdog.ended:
                self._say_goodbye()
        finally:
            for actor in actors:
                actor.kill()
            self._end_lingering(actors)
            # Wait for running restarts: a call to Ray after its end would start a new Ray.
            for restart in self._restarts:
                if restart.acquire(timeout=CLOSE_TIMEOUT_S):
                    restart.release()

    def _end_lingering(self, actors: Sequence[RayActor]) -> None:
        """Kill the processes of stopped actors: `kill` makes Ray ask an actor to end itself, which
        a stopped process does not do."""
        for actor in actors:
            if actor.member.lingers and not actor.ended and not self._watchdog.ray_ended:
                actor.end(CLOSE_TIMEOUT_S)

    def _say_goodbye(self) -> None:
        """Call `close` on all living workers, with all parts, and wait `CLOSE_TIMEOUT_S` at most.
        The death or lateness of a worker is only logged if workers are replaceable, else raised;
        other errors are raised."""
        parts = [part for actor in self._actors for part in actor.parts]
        living = [actor for actor in parts if actor.member.death is None]
        calls = [actor.run("close", Call(())) for actor in living]
        try:
            self._answers("close", living, calls).collect(CLOSE_TIMEOUT_S)
        except (WorkerLostError, WaitTimeoutError) as error:
            if not self._recipe.placement.replaceable:
                raise
            LOGGER.warning("%s", error)

    def _start_on(self, ranks: Sequence[int], method: str, calls: Sequence[Call]) -> RayAnswers:
        actors = [self._actors[rank] for rank in ranks]
        shared = shared_batches(calls)
        refs = [actor.run(method, call) for actor, call in zip(actors, shared, strict=True)]
        return self._answers(method, actors, refs)

    def _start_beside(self, method: str, calls: Sequence[Call], *, parts: bool) -> RayAnswers:
        called = list(zip(self._actors, calls, strict=True))
        if parts:
            called += [(part, call) for actor, call in called for part in actor.followers]
        refs = [actor.run_beside(method, call) for actor, call in called]
        return self._answers(method, [actor for actor, _ in called], refs)

    def _answers(self, method: str, actors: Sequence[RayActor], refs: Sequence[Any]) -> RayAnswers:
        """Return the answers to `refs`, one per actor in the same order; `method` is for
        messages."""
        members = [actor.member for actor in actors]
        return RayAnswers(method, refs, members, self._watchdog)

    def _ask(self, rank: int, method: str, call: Call, apart: Apart | None) -> Awaitable[Any]:
        """See `Cluster._ask`; call this on the event loop that awaits the answer."""
        actor, loop = self._actors[rank], asyncio.get_running_loop()
        if loop not in actor.calls:
            actor.calls[loop] = BundledCalls(actor, self._watchdog)
        return actor.calls[loop].ask(method, call, apart)


def shared_batches(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with references in place of batches that several ranks get, such as tensor
    parallel ranks: Ray then stores such a batch once, not once for each rank. Ray resolves the
    references among positional arguments before it runs a method; keyword arguments stay as they
    are."""
    times = Counter(id(arg) for call in calls for arg in call.args if isinstance(arg, Batch))
    refs: dict[int, Any] = {}

    def shared(arg: Any) -> Any:
        if times[id(arg)] < 2:
            return arg
        if id(arg) not in refs:
            refs[id(arg)] = ray.put(arg)
        return refs[id(arg)]

    return [replace(call, args=tuple(map(shared, call.args))) for call in calls]
