"""`RayActor`: one worker's process on Ray, from its start to its end.

Roles on the same slots are colocated: actors ask Ray for nothing and are told their devices by
environment and `WorkerSpec`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.core.types import WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.dispatch import Call
from roll.distributed.on_ray.environment import WORKER_TOKEN, actor_env
from roll.distributed.on_ray.host import BESIDE_GROUP, WATCH_GROUP, AsyncHost, HostInfo, SyncHost
from roll.distributed.on_ray.members import Member
from roll.distributed.processes.reaper import end_marked
from roll.distributed.watchdog import Watchdog
from roll.distributed.worker import is_async

MAX_CONCURRENT_CALLS = 100_000
"""Of one asynchronous worker; the scheduler in front of it sets the real limit."""

END_TIMEOUT_S = 30.0
"""For a killed actor's processes to be gone; a process that holds a GPU takes seconds."""


@dataclass(frozen=True, slots=True)
class JobDevice:
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
    python: str | None
    """The command that Ray starts workers with; None: Python."""
    start_timeout_s: float
    call_timeout_s: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one cluster's workers."""

    worker_cls: Callable[..., Any]
    placement: Placement
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RayActor:
    """Started empty; `arrive` when it has answered `about`, then `build` the worker in it."""

    def __init__(
        self, recipe: Recipe, rank: int, own: tuple[JobDevice, ...], settings: ActorSettings
    ) -> None:
        place = recipe.placement
        self.member = Member(place.role, place.label, rank, place.replaceable)
        self.ended = False
        """Nothing is left of it."""
        self._recipe = recipe
        self._where = PlacementGroupSchedulingStrategy(own[0].group, own[0].bundle)
        token = uuid.uuid4().hex
        self._mark = f"{WORKER_TOKEN}={token}"
        assert isinstance(recipe.worker_cls, type)
        asynchronous = is_async(recipe.worker_cls)
        env = actor_env(
            platform=settings.platform,
            devices=[slot.device for slot in own],
            cores=cores_of(own),
            token=token,
            python_path=settings.python_path,
            # Asynchronous workers (engines, rewards) compute elsewhere, and gained nothing from it.
            keep_memory=settings.platform == "cpu" and not asynchronous,
            single_host=settings.single_node,
        )
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env}
            | ({"py_executable": settings.python} if settings.python else {}),
            "scheduling_strategy": self._where,
        }
        host: type[AsyncHost | SyncHost] = SyncHost
        if asynchronous:
            host = AsyncHost
            options["max_concurrency"] = MAX_CONCURRENT_CALLS
        # Ray shows the class in the process title, so that `ps` tells roles and ranks apart.
        named = type(re.sub(r"[^\w\[\]]", "_", self.member.name), (host,), {})
        actor_cls = ray.remote(concurrency_groups={WATCH_GROUP: 1, BESIDE_GROUP: 2})(named)
        self._handle = actor_cls.options(**options).remote()

    @property
    def info(self) -> HostInfo:
        assert self.member.info is not None, "the actor has not arrived"
        return self.member.info

    def about(self) -> Any:
        """Reference to its `HostInfo`."""
        return self._handle.about.remote()

    def arrive(self, info: HostInfo, watchdog: Watchdog) -> None:
        """It has answered `about`: from now on its death is noticed."""
        self.member.info = info
        watching = self._handle.watch.options(concurrency_group=WATCH_GROUP).remote()
        watchdog.watch(watching, self.member, self._beat)

    def free_port(self) -> Any:
        """Reference to the number of a port that is free on its node."""
        return self._handle.free_port.remote()

    def build(self, spec: WorkerSpec) -> Any:
        """Make the worker; reference to its `RankInfo`."""
        recipe = self._recipe
        return self._handle.build.remote(recipe.worker_cls, spec, recipe.args, recipe.kwargs)

    def run(self, method: str, call: Call) -> Any:
        """Reference to the result of a method of the worker."""
        return self._handle.run.remote(method, call.kwargs, *call.args)

    def run_beside(self, method: str, call: Call) -> Any:
        """As `run`, while another call may run."""
        beside = self._handle.run.options(concurrency_group=BESIDE_GROUP)
        return beside.remote(method, call.kwargs, *call.args)

    def _beat(self) -> Any:
        """Reference to a heartbeat."""
        return self._handle.beat.options(concurrency_group=BESIDE_GROUP).remote()

    def kill(self) -> None:
        """Kill the process where it stands; its reaper kills what it started. Does not wait."""
        ray.kill(self._handle)

    def end(self, timeout_s: float) -> bool:
        """Kill the process and all it started, even what is stopped; whether all of it is gone.

        Args:
            timeout_s: for a process to start on another node, which then has `END_TIMEOUT_S`.
        """
        self.kill()
        # On its node, and not by itself: one that is stopped cannot end what it started.
        info = self.member.info  # None: it has not told where it is, which `_where` knows, too
        if info is not None and info.node == ray.get_runtime_context().get_node_id():
            return end_marked(self._mark, END_TIMEOUT_S)
        if not _lives(self.info.node):  # a task for it would wait until its limit
            return True
        task = ray.remote(num_cpus=0)(end_marked).options(scheduling_strategy=self._where)
        ending = task.remote(self._mark, END_TIMEOUT_S)
        try:
            return bool(ray.get(ending, timeout=timeout_s + END_TIMEOUT_S))
        except ray.exceptions.RayError:  # out of time, or its node has gone meanwhile
            return not _lives(self.info.node)


def _lives(node: str) -> bool:
    """Whether a node is part of the cluster; what ran on one that is lost is out of its reach."""
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def cores_of(slots: tuple[JobDevice, ...]) -> tuple[int, ...]:
    """All cores of some slots."""
    return tuple(sorted({core for slot in slots for core in slot.cores}))
