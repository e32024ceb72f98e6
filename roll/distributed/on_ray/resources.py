"""`ResourceManager`: reserves all devices of the job on Ray and starts clusters on them.

There is one placement group per node, with one bundle per device. The devices belong to the job and
not to a role, so roles with the same pool are colocated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Concatenate

import ray

from roll.config.sections.placement import ClusterConfig, placement_problem
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.distributed.cluster import P, Placement, W
from roll.distributed.device_layout import DeviceLayout, address_to_join, plan_layout
from roll.distributed.on_ray import start as ray_start
from roll.distributed.on_ray.actor import ActorSettings, JobDevice, WorkerRecipe
from roll.distributed.on_ray.cluster import RayCluster
from roll.distributed.on_ray.environment import prepare_ray
from roll.distributed.on_ray.nodes import Node, claim_devices, usable_nodes, wait_for_nodes
from roll.distributed.on_ray.token import (
    HOW_TO_USE_A_TOKEN,
    found_token,
    names_a_token,
    own_token,
    use_token_of_cluster,
)
from roll.distributed.processes.fork_server import ForkServer
from roll.distributed.watchdog import Watchdog
from roll.platform.machine import Machine, cores, this_machine

logger = logging.getLogger(__name__)


class ResourceManager:
    """A launcher that starts or joins Ray, reserves the devices and starts clusters. `close` undoes
    all of this."""

    def __init__(
        self,
        config: ClusterConfig,
        pools: Mapping[str, str],
        *,
        python_path: Sequence[str] = (),
        fork_server: ForkServer | None = None,
        overlapping: bool = False,
    ) -> None:
        """Start or join Ray, and reserve the devices of the pools.

        Args:
            pools: name -> device list, such as "0-3".
            python_path: folders with user code that workers must be able to import.
            fork_server: makes the workers if they all run on this machine without GPUs.
            overlapping: True if roles compute at the same time.

        Raises:
            ConfigError: too few devices (checked before Ray is started), or no Ray can be joined.
            WaitTimeoutError: nodes or devices were not available within `config.start_timeout_s`.
        """
        self._undo = ExitStack()
        self._clusters: list[RayCluster[Any]] = []
        address = address_to_join(config)
        joined = bool(address) or ray.is_initialized()
        try:
            if joined:
                self.layout, nodes = self._join_ray(config, pools, address)
            else:
                self.layout, nodes = self._start_ray(config, pools)
            self._watchdog = Watchdog([] if joined else ray_start.daemons())
            self._undo.callback(self._watchdog.close)
            # If the run started Ray, the reservations end with Ray. Releasing them one by one would
            # wait a minute for Ray in vain if a signal to the process group has ended Ray, too.
            undo = self._undo if joined else ExitStack()
            self._slots = claim_devices(nodes, self.layout, config.start_timeout_s, undo)
        except BaseException:
            self.close(graceful=False)
            raise
        forks = self.layout.platform == "cpu" and self.layout.nodes == 1 and not address
        server = fork_server if forks else None
        self._settings = ActorSettings(
            platform=self.layout.platform,
            single_node=self.layout.nodes == 1 and not joined,
            python_path=tuple(os.path.abspath(folder) for folder in python_path),
            fork_server=server,
            overlapping=overlapping,
            start_timeout_s=config.start_timeout_s,
            call_timeout_s=config.call_timeout_s,
        )

    @property
    def platform(self) -> str:
        """`cpu` or `cuda`."""
        return self.layout.platform

    def slots(
        self, pool: str, per_worker: int = 1, *, several_nodes: bool = False
    ) -> list[tuple[JobDevice, ...]]:
        """Return the devices of a pool, grouped into one tuple of `per_worker` devices per worker.

        Args:
            several_nodes: let a worker with more devices than a node has take whole nodes.

        Raises:
            ConfigError: there is no such pool, its devices do not divide into workers, or a worker
                would have devices of several nodes and may not.
        """
        if pool not in self.layout.pools:
            known = ", ".join(sorted(self.layout.pools))
            raise ConfigError(f"no pool is called {pool!r} (pools: {known})")
        found = [self._slots[number] for number in self.layout.pools[pool]]
        if len(found) % per_worker:
            raise ConfigError(
                f"pools.{pool} has {len(found)} devices, which do not divide into workers "
                f"of {per_worker}"
            )
        groups = [tuple(found[i : i + per_worker]) for i in range(0, len(found), per_worker)]
        per_node = self.layout.devices_per_node
        for group in groups:
            found_numbers = [slot.number for slot in group]
            problem = placement_problem(found_numbers, per_node, several_nodes=several_nodes)
            if problem is not None:
                raise ConfigError(f"pools.{pool}: {problem}")
        return groups

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RayCluster[W]:
        """Start a cluster; see `Launcher.start`."""
        recipe = WorkerRecipe(worker_cls, placement, args, kwargs)
        slots: list[tuple[JobDevice, ...]] = [(JobDevice(-1, 0, 0, "", cores(), None, 0),)]
        if placement.pool is not None:
            spans = getattr(worker_cls, "follower", None) is not None
            slots = self.slots(placement.pool, placement.per_worker, several_nodes=spans)
        if placement.workers is not None:
            slots = [slots[i % len(slots)] for i in range(placement.workers)]
        cluster: RayCluster[W] = RayCluster(recipe, slots, self._settings, self._watchdog)
        self._clusters.append(cluster)
        return cluster

    def check(self) -> None:
        """Raise an error if the run cannot continue. For loops that do not wait for a cluster.

        Raises:
            WorkerError: a worker that is not replaceable, or a process of Ray, died.
        """
        self._watchdog.check()

    def close(self, *, graceful: bool = True) -> None:
        """End the clusters, newest first, and release the devices. End Ray if this object started
        it, or disconnect from the Ray cluster if this object joined it.

        Args:
            graceful: see `Cluster.close`.
        """
        with self._undo as undo:
            for cluster in self._clusters:
                undo.callback(cluster.close, graceful=graceful)
            self._clusters = []

    def __enter__(self) -> ResourceManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(graceful=kind is None)

    def _start_ray(
        self, config: ClusterConfig, pools: Mapping[str, str]
    ) -> tuple[DeviceLayout, list[Node]]:
        """Start a local Ray with a token of its own and this machine's cores and GPUs; `close` ends
        it. Return the layout of the devices and this node."""
        machine = this_machine()
        layout = plan_layout(config, pools, machine, joined=False)
        prepare_ray()
        self._undo.enter_context(own_token())
        self._undo.callback(ray_start.end)
        ray_start.start(
            num_cpus=len(machine.cores),
            num_gpus=machine.gpus if layout.platform == "cuda" else 0,
        )
        return layout, wait_for_nodes(1, config.start_timeout_s)

    def _join_ray(
        self, config: ClusterConfig, pools: Mapping[str, str], address: str | None
    ) -> tuple[DeviceLayout, list[Node]]:
        """Join the Ray at `address`; return the layout of the devices and the nodes with them."""
        self._connect(address)
        nodes = wait_for_nodes(
            config.nodes,
            config.start_timeout_s,
            platform=config.platform,
            per_node=config.devices_per_node,
        )
        layout = plan_layout(config, pools, _smallest(nodes), joined=True)
        if config.platform == "auto" and layout.platform == "cpu":
            logger.warning(
                "no node of this Ray has GPUs, so the run uses their cores; cluster.platform=cuda "
                "waits for nodes with GPUs, cpu says that cores are meant"
            )
        return layout, usable_nodes(nodes, layout)

    def _connect(self, address: str | None) -> None:
        """Join the Ray at `address` unless joined already, with the cluster's token if it is found.
        Warn if Ray lets this process join without a token.

        Raises:
            ConfigError: Ray refuses, or does not answer.
        """
        if ray.is_initialized():
            return
        shown = self._undo.enter_context(use_token_of_cluster())
        self._undo.callback(ray.shutdown)
        try:
            ray_start.join(address)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            if names_a_token(error):
                raise ConfigError(_refused(address, shown)) from error
            raise ConfigError(
                f"no Ray cluster answers at {address!r} (cluster.address or RAY_ADDRESS): {error}"
            ) from error
        if not shown:
            logger.warning(
                "the Ray at %s asks for no token: whoever reaches its ports runs code on its "
                "nodes. %s",
                address,
                HOW_TO_USE_A_TOKEN,
            )


def _refused(address: str | None, shown: bool) -> str:
    """Return the message for a Ray that refuses this process; `shown`: it was shown a token."""
    seen = f"the one in {found_token()} is not its own" if shown else "this process shows none"
    return (
        f"the Ray at {address!r} (cluster.address or RAY_ADDRESS) lets nobody in without its "
        f"token, and {seen}. {HOW_TO_USE_A_TOKEN}"
    )


def _smallest(nodes: Sequence[Node]) -> Machine:
    """Return a machine with the smallest number of GPUs and of cores of all nodes, and 0 GB. If
    some nodes have GPUs, the other nodes are left out."""
    with_gpus = [node for node in nodes if node.gpus] or list(nodes)
    return Machine(
        gpus=min(node.gpus for node in with_gpus),
        cores=tuple(range(min(node.cpus for node in with_gpus))),
        memory_gb=0.0,
    )
