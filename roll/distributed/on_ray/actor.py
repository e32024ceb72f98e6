"""`RayActor`: the process of one worker on Ray, from its start to its end.

Roles may share devices. So actors reserve no resources of Ray; they learn their devices from
environment variables and from their `WorkerSpec`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from roll.core.types import WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.dispatch import Call
from roll.distributed.on_ray.bundle_host import SentCall
from roll.distributed.on_ray.bundles import BundledCalls
from roll.distributed.on_ray.environment import (
    WORKER_TOKEN,
    actor_env,
    secrets,
    thread_waiting,
)
from roll.distributed.on_ray.host import BESIDE_GROUP, WATCH_GROUP, AsyncHost, HostInfo, SyncHost
from roll.distributed.on_ray.members import Member
from roll.distributed.processes.child_forks import FORKS_CHILDREN
from roll.distributed.processes.fork_server import ForkServer
from roll.distributed.processes.reaper import end_marked
from roll.distributed.watchdog import Watchdog
from roll.distributed.worker import Worker, is_async

MAX_CONCURRENT_CALLS = 100_000
"""Maximum number of concurrent calls of an asynchronous worker. Intentionally high: the scheduler
that sends requests to the worker sets the real limit."""

END_TIMEOUT_S = 30.0
"""Time limit for the end of an actor's processes after they were killed, in seconds. A process that
uses a GPU takes some seconds."""


@dataclass(frozen=True, slots=True)
class JobDevice:
    """A device of the job, with the placement group of Ray that reserves it."""

    number: int
    """Number of the device in the job, as pools name it."""
    node: int
    """Number of the node in the job."""
    device: int
    """Number of the GPU on its node, or of the slot of CPU cores."""
    name: str
    """Name of the GPU for CUDA_VISIBLE_DEVICES: its number or UUID."""
    cores: tuple[int, ...]
    """Numbers of the CPU cores that belong to the device."""
    group: PlacementGroup | None
    """Placement group of Ray that reserves the device; None: no device, but only the cores of the
    driver's node."""
    bundle: int
    """Index of the device's bundle in `group`."""


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Settings that all clusters of a run have in common."""

    platform: str
    """`cpu` or `cuda`."""
    single_node: bool
    """True if all workers are on this machine, on a Ray that the run has started."""
    overlapping: bool
    """True if roles compute at the same time."""
    python_path: tuple[str, ...]
    """Folders with user code, which workers search first for modules."""
    fork_server: ForkServer | None
    """Makes the processes of workers; None: they are new interpreters."""
    start_timeout_s: float
    """Time limit for the start of a cluster or of a worker, in seconds."""
    call_timeout_s: float
    """Default time limit of a call to a cluster, in seconds."""


@dataclass(frozen=True, slots=True)
class WorkerRecipe:
    """Class, placement and arguments of the workers of one cluster."""

    worker_cls: Callable[..., Any]
    placement: Placement
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RayActor:
    """A Ray actor for one worker.

    The constructor starts the actor without a worker. When the actor has answered `about`, the
    caller passes the answer to `arrive`; then `build` builds the worker in the actor.
    """

    def __init__(
        self,
        recipe: WorkerRecipe,
        rank: int,
        own: tuple[JobDevice, ...],
        settings: ActorSettings,
        part: int = 0,
    ) -> None:
        """Start the actor, without waiting for it.

        Args:
            own: devices of the actor, at least one, all on one node.
            part: number of the part that it is of a worker on several nodes.
        """
        place = recipe.placement
        self.member = Member(place.role, place.label, rank, place.replaceable, part=part)
        self.own = own
        self.followers: tuple[RayActor, ...] = ()
        """The other parts of its worker, on other nodes, if this is the first of several."""
        self.ended = False
        """True once all processes of the actor are known to have ended."""
        self.calls: WeakKeyDictionary[asyncio.AbstractEventLoop, BundledCalls] = WeakKeyDictionary()
        """Calls on their way, by the event loop that makes them."""
        self._recipe = recipe
        self._where = _where(own[0])
        token = uuid.uuid4().hex
        self._mark = f"{WORKER_TOKEN}={token}"
        assert isinstance(recipe.worker_cls, type)
        asynchronous = is_async(recipe.worker_cls)
        env = actor_env(
            platform=settings.platform,
            devices=[slot.name for slot in own if slot.group is not None],
            cores=cores_of(own),
            token=token,
            python_path=settings.python_path,
            # Asynchronous workers (engines, rewards) compute in other processes: no gain for them.
            keep_memory=settings.platform == "cpu" and not asynchronous,
            single_host=settings.single_node,
            own=place.env,
        )
        if settings.platform == "cpu":
            environ = {**os.environ, **place.env}
            env |= thread_waiting(environ, overlapping=settings.overlapping)
        python = _python(recipe, rank, settings.fork_server, env)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env} | python,
            "scheduling_strategy": self._where,
        }
        if asynchronous:
            options["max_concurrency"] = MAX_CONCURRENT_CALLS
        actor_cls = _actor_class(self.member.name, AsyncHost if asynchronous else SyncHost)
        self._handle = actor_cls.options(**options).remote(secrets(place.env))
        # Methods that are called often get their options once: those are a quarter of the costs of
        # a call. Only an asynchronous host takes bundles.
        self._heartbeat = self._handle.beat.options(concurrency_group=BESIDE_GROUP)
        if asynchronous:
            self._exchange = self._handle.exchange.options(num_returns=2)

    @property
    def parts(self) -> tuple[RayActor, ...]:
        """All actors of its worker, if this is the first: itself, and those on other nodes."""
        return (self, *self.followers)

    @property
    def info(self) -> HostInfo:
        """Process and node of the actor; known after `arrive`."""
        assert self.member.info is not None, "the actor has not arrived"
        return self.member.info

    def about(self) -> Any:
        """Ask the actor for its `HostInfo`; return the reference to the answer."""
        return self._handle.about.remote()

    def follow(self, watchdog: Watchdog) -> None:
        """Let the worker of this actor follow the first part of its worker, until it fails."""
        watchdog.watch_call(self.run("follow", Call(())), self.member)

    def arrive(self, info: HostInfo, watchdog: Watchdog) -> None:
        """Store the answer to `about`, and let the watchdog watch the actor from now on."""
        self.member.info = info
        watching = self._handle.watch.options(concurrency_group=WATCH_GROUP).remote()
        watchdog.watch(watching, self.member, self._beat)

    def free_port(self) -> Any:
        """Ask for a free port on the actor's node; return the reference to the port number."""
        return self._handle.free_port.remote()

    def build(self, spec: WorkerSpec) -> Any:
        """Build the worker in the actor; return the reference to its `RankInfo`."""
        recipe = self._recipe
        return self._handle.build.remote(recipe.worker_cls, spec, recipe.args, recipe.kwargs)

    def run(self, method: str, call: Call) -> Any:
        """Call a method of the worker; return the reference to the result."""
        return self._handle.run.remote(method, call.kwargs, *call.args)

    def exchange(self, caller: str, calls: Sequence[SentCall]) -> tuple[Any, Any]:
        """Begin calls and wait for answers; see `BundleActor`."""
        bundle, parts = self._exchange.remote(caller, calls)
        return bundle, parts

    def begin(self, caller: str, calls: Sequence[SentCall]) -> Any:
        """Begin calls; see `BundleActor`."""
        return self._handle.begin.remote(caller, calls)

    def recover(self, caller: str) -> Any:
        """Make the last answers ready again; see `BundleActor`."""
        return self._handle.recover.remote(caller)

    def run_beside(self, method: str, call: Call) -> Any:
        """Call a method while another call may run; return the reference to the result."""
        beside = self._handle.run.options(concurrency_group=BESIDE_GROUP)
        return beside.remote(method, call.kwargs, *call.args)

    def _beat(self) -> Any:
        """Ask the actor for a heartbeat; return the reference to the answer."""
        return self._heartbeat.remote()

    def kill(self) -> None:
        """Kill the process at once, without waiting for its end. Its reaper then kills the
        processes that it started."""
        ray.kill(self._handle)

    def end(self, timeout_s: float) -> bool:
        """Kill the process and all processes that it started, even stopped ones; wait for the end.

        Args:
            timeout_s: time limit for the start of the task on another node that kills them, in
                seconds. The task itself has the limit `END_TIMEOUT_S`.

        Returns:
            True if all these processes have ended, or their node is no longer part of the cluster.
        """
        self.kill()
        # Not done in the actor itself: if it is stopped, it cannot end its processes.
        info = self.member.info
        node = info.node if info is not None else self._planned_node()
        killed = {(info.pid, info.started)} if info is not None and info.started else ()
        if node == ray.get_runtime_context().get_node_id():
            return end_marked(self._mark, END_TIMEOUT_S, killed)
        if not _lives(node):  # a task for a lost node would only wait for its time limit
            return True
        task = ray.remote(num_cpus=0)(end_marked).options(scheduling_strategy=self._where)
        ending = task.remote(self._mark, END_TIMEOUT_S, killed)
        try:
            return bool(ray.get(ending, timeout=timeout_s + END_TIMEOUT_S))
        except ray.exceptions.RayError:  # time limit, or the node was lost meanwhile
            return not _lives(node)

    def _planned_node(self) -> str:
        """Return Ray's ID of the node with the actor's devices, which is known before the actor
        arrives; empty if Ray does not know it any more."""
        if self.own[0].group is None:
            return str(ray.get_runtime_context().get_node_id())
        nodes = placement_group_table(self.own[0].group).get("bundles_to_node_id", {})
        return str(nodes.get(self.own[0].bundle, ""))


def start_parts(
    recipe: WorkerRecipe, rank: int, own: tuple[JobDevice, ...], settings: ActorSettings
) -> RayActor:
    """Start the actor of a worker, or one for each node that the worker's devices lie on, which
    live and die together. Return the first, without waiting for any.

    Args:
        own: devices of the worker; those of a node follow each other.
    """
    nodes = dict.fromkeys(slot.node for slot in own)
    groups = [tuple(slot for slot in own if slot.node == node) for node in nodes]
    first = RayActor(recipe, rank, groups[0], settings)
    others = [
        RayActor(_followed(recipe), rank, group, settings, part)
        for part, group in enumerate(groups[1:], start=1)
    ]
    first.followers = tuple(others)
    for actor in first.parts if others else ():
        actor.member.kill = actor.kill
        actor.member.others = [each.member for each in first.parts if each is not actor]
    return first


def _followed(recipe: WorkerRecipe) -> WorkerRecipe:
    """Return the recipe of the further parts of a worker. `ResourceManager.slots` has checked that
    its class has some. A program that is to record the worker records the first part."""
    assert isinstance(recipe.worker_cls, type)
    assert issubclass(recipe.worker_cls, Worker)
    follower = recipe.worker_cls.follower
    assert follower is not None
    return replace(recipe, worker_cls=follower, placement=replace(recipe.placement, under={}))


def _where(device: JobDevice) -> PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy:
    """Return the strategy of Ray that starts an actor on a device, or on the driver's node."""
    if device.group is None:
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return PlacementGroupSchedulingStrategy(device.group, device.bundle)


def _python(
    recipe: WorkerRecipe, rank: int, server: ForkServer | None, env: dict[str, str]
) -> dict[str, str]:
    """Return the option of a runtime environment that has another program start the worker, or the
    server fork it; empty without either. A worker that starts an engine gets a variable in `env`
    for forks of its own."""
    place = recipe.placement
    if rank in place.under:
        return {"py_executable": shlex.join([*place.under[rank], sys.executable])}
    if server is None or place.env:  # libraries of a fork have read their variables in the server
        return {}
    if getattr(recipe.worker_cls, "starts_processes", False) and server.engine_python:
        env[FORKS_CHILDREN] = "1"
        return {"py_executable": server.engine_python}
    return {"py_executable": server.python}


@cache
def _actor_class(name: str, host: type[AsyncHost | SyncHost]) -> Any:
    """Return Ray's actor class of a worker. Ray puts its name, which is that of the worker, into
    the process title, so `ps` shows role and rank. Restarts use the same class: Ray keeps the
    definition of every class that it has seen, 0.1 MB each in the driver."""
    named = type(re.sub(r"[^\w\[\]]", "_", name), (host,), {})
    return ray.remote(concurrency_groups={WATCH_GROUP: 1, BESIDE_GROUP: 2})(named)


def _lives(node: str) -> bool:
    """Return whether the node with Ray's id `node` is part of the Ray cluster; a lost node cannot
    be reached."""
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def cores_of(slots: tuple[JobDevice, ...]) -> tuple[int, ...]:
    """Return the numbers of all CPU cores of some devices, sorted."""
    return tuple(sorted({core for slot in slots for core in slot.cores}))
