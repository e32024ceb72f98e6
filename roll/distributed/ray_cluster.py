"""`RayCluster`: one actor per rank. Roles on the same slots are colocated: actors ask Ray for
nothing and are told their devices by environment and `WorkerSpec`."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.core.errors import WaitTimeoutError
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.actor_env import actor_env
from roll.distributed.cluster import Answers, Cluster, Placement, W
from roll.distributed.dispatch import Call
from roll.distributed.failures import raise_failure
from roll.distributed.host import WATCH_GROUP, AsyncHost, HostInfo, SyncHost
from roll.distributed.watchdog import POLL_S, Member, Watchdog
from roll.distributed.worker import is_async

CLOSE_TIMEOUT_S = 20.0
MAX_CONCURRENT_CALLS = 100_000
"""Of one asynchronous worker; the scheduler in front of it sets the real limit."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One device, named by its place in the job, not by what Ray calls it."""

    number: int
    """Job-wide."""
    node: int
    device: int
    """Real GPU number on the node, or slot of cores."""
    cores: tuple[int, ...]
    group: PlacementGroup
    bundle: int


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """What all clusters of a run share."""

    platform: str
    single_node: bool
    python_path: tuple[str, ...]
    start_timeout_s: float
    call_timeout_s: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one cluster's workers."""

    worker_cls: Callable[..., Any]
    placement: Placement
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RayCluster(Cluster[W], Generic[W]):
    """Workers in Ray actors, one process each."""

    def __init__(
        self,
        recipe: Recipe,
        slots: Sequence[tuple[Slot, ...]],
        settings: ActorSettings,
        watchdog: Watchdog,
    ) -> None:
        place = recipe.placement
        super().__init__(place.role, [], settings.call_timeout_s, place.label)
        self._watchdog = watchdog
        self._names = [f"{place.name}[{rank}]" for rank in range(len(slots))]
        self._watching: list[Any] = []
        self._closed = False
        self.infos: tuple[HostInfo, ...] = ()
        """Process and node of each rank."""
        self._actors = [
            _start_actor(name, recipe, own, settings)
            for name, own in zip(self._names, slots, strict=True)
        ]
        try:
            self.ranks = tuple(self._build(recipe, slots, settings))
        except BaseException:
            self.close(graceful=False)
            raise

    def _build(
        self, recipe: Recipe, slots: Sequence[tuple[Slot, ...]], settings: ActorSettings
    ) -> list[RankInfo]:
        deadline = time.monotonic() + settings.start_timeout_s

        def all_ranks(what: str, refs: list[Any]) -> list[Any]:
            return self._answers(what, refs).collect(max(deadline - time.monotonic(), 0.1))

        self.infos = tuple(all_ranks("start", [actor.about.remote() for actor in self._actors]))
        for name, info, actor in zip(self._names, self.infos, self._actors, strict=True):
            watching = actor.watch.options(concurrency_group=WATCH_GROUP).remote()
            self._watching.append(watching)
            self._watchdog.watch(watching, Member(name, info.pid, info.address, info.log))
        port = self._answers("free_port", [self._actors[0].free_port.remote()])
        hosts = ["127.0.0.1" if settings.single_node else info.address for info in self.infos]
        rendezvous = f"{hosts[0]}:{port.collect(settings.start_timeout_s)[0]}"
        refs = []
        for rank, (actor, own) in enumerate(zip(self._actors, slots, strict=True)):
            spec = WorkerSpec(
                role=recipe.placement.role,
                rank=rank,
                world_size=len(slots),
                devices=tuple(slot.device for slot in own),
                cores=_cores(own),
                node=own[0].node,
                rendezvous=rendezvous,
                seed=recipe.placement.seed,
                platform=settings.platform,
                host=hosts[rank],
                label=recipe.placement.label,
            )
            refs.append(actor.build.remote(recipe.worker_cls, spec, recipe.args, recipe.kwargs))
        return all_ranks("__init__", refs)

    def close(self, *, graceful: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._watchdog.forget(self._watching)
        try:
            if graceful and self._watchdog.death is None:
                calls = [actor.run.remote("close", {}) for actor in self._actors]
                self._answers("close", calls).collect(CLOSE_TIMEOUT_S)
        finally:
            for actor in self._actors:
                ray.kill(actor)

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        refs = [
            actor.run.remote(method, call.kwargs, *call.args)
            for actor, call in zip(self._actors, calls, strict=True)
        ]
        return self._answers(method, refs)

    def _answers(self, method: str, refs: list[Any]) -> RayAnswers:
        return RayAnswers(method, refs, self._names, self._watchdog)

    def _ask(self, rank: int, method: str, call: Call) -> Awaitable[Any]:
        return self._wait_guarded(rank, method, call)

    async def _wait_guarded(self, rank: int, method: str, call: Call) -> Any:
        ref = self._actors[rank].run.remote(method, call.kwargs, *call.args)
        future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        self._watchdog.guard(future)
        try:
            return await future
        except asyncio.CancelledError:
            # Either the watchdog cancelled the future because a worker died, or the caller gave up.
            self._watchdog.check()
            raise
        except ray.exceptions.RayError as error:
            await asyncio.to_thread(raise_failure, error, self._names[rank], method, self._watchdog)
        finally:
            self._watchdog.release(future)


class RayAnswers:
    """Results of one call, as Ray references; waits in slices, so that any death is noticed."""

    def __init__(
        self, method: str, refs: list[Any], names: Sequence[str], watchdog: Watchdog
    ) -> None:
        self._method = method
        self._refs = refs
        self._names = names
        self._watchdog = watchdog
        self._results: dict[int, Any] = {}

    def done(self) -> bool:
        waiting = [ref for rank, ref in enumerate(self._refs) if rank not in self._results]
        return not waiting or not ray.wait(waiting, num_returns=len(waiting), timeout=0)[1]

    def poll(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        ranks = {ref: rank for rank, ref in enumerate(self._refs) if rank not in self._results}
        while ranks:
            left_s = deadline - time.monotonic()
            ready, _ = ray.wait(list(ranks), num_returns=1, timeout=max(0.0, min(POLL_S, left_s)))
            for ref in ready:
                rank = ranks.pop(ref)
                self._results[rank] = self._fetch(rank, ref)
            if not ready:
                self._watchdog.check()
                if left_s <= 0:
                    return False
        return True

    def collect(self, timeout_s: float) -> list[Any]:
        if not self.poll(timeout_s):
            raise self.overdue(timeout_s)
        return [self._results[rank] for rank in range(len(self._refs))]

    def _fetch(self, rank: int, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            raise_failure(error, self._names[rank], self._method, self._watchdog)

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        missing = [rank for rank in range(len(self._refs)) if rank not in self._results]
        who = self._names[0]
        if len(self._refs) > 1:
            who = f"{who[:-2]}0..{len(self._refs) - 1}]"
        silent = ", ".join(str(rank) for rank in missing)
        which = f"rank {silent} has" if len(missing) == 1 else f"ranks {silent} have"
        return WaitTimeoutError(
            f"waited {timeout_s:g} s for {who}.{self._method} ({which} not answered); "
            "cluster.call_timeout_s and cluster.start_timeout_s are the limits"
        )


def _cores(slots: Sequence[Slot]) -> tuple[int, ...]:
    return tuple(sorted({core for slot in slots for core in slot.cores}))


def _start_actor(name: str, recipe: Recipe, own: tuple[Slot, ...], settings: ActorSettings) -> Any:
    assert isinstance(recipe.worker_cls, type)
    asynchronous = is_async(recipe.worker_cls)
    env = actor_env(
        platform=settings.platform,
        devices=[slot.device for slot in own],
        cores=_cores(own),
        token=uuid.uuid4().hex,
        python_path=settings.python_path,
        # Asynchronous workers (engines, rewards) compute elsewhere, and gained nothing from it.
        keep_memory=settings.platform == "cpu" and not asynchronous,
    )
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "max_restarts": 0,
        "runtime_env": {"env_vars": env},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(own[0].group, own[0].bundle),
    }
    host: type[AsyncHost | SyncHost] = SyncHost
    if asynchronous:
        host = AsyncHost
        options["max_concurrency"] = MAX_CONCURRENT_CALLS
    # Ray shows the class in the process title, so that `ps` tells roles and ranks apart.
    named = type(re.sub(r"[^\w\[\]]", "_", name), (host,), {})
    return ray.remote(concurrency_groups={WATCH_GROUP: 1})(named).options(**options).remote()
