"""The classes of Ray actors that host a worker.

An actor starts without its worker, and `build` builds the worker later. So an error of the worker's
constructor reaches the driver like an error of any other method, and the driver can watch the actor
from its start.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray

from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.dispatch import Apart, dispatch_of
from roll.distributed.on_ray.bundle_host import Bundle, BundleHost, SentCall
from roll.distributed.on_ray.environment import (
    WITHOUT_TRITON,
    WORKER_TOKEN,
    add_to_environment,
)
from roll.distributed.processes.reaper import start_reaper, started
from roll.distributed.remote_values import Packed
from roll.distributed.worker import Worker
from roll.platform.allocator import give_back_each_minute
from roll.platform.logs import setup_logging
from roll.platform.machine import free_port

WATCH_GROUP = "watch"
"""Concurrency group of `watch`, so that this call, which never returns, blocks no other call."""

BESIDE_GROUP = "beside"
"""Concurrency group of calls that run while another call runs: heartbeats, and calls that end the
other call."""


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Process and node of an actor."""

    pid: int
    started: str | None
    """See `roll.distributed.processes.reaper.started`."""
    address: str
    """IP address of its node."""
    log: str
    """Path of the file that its standard error is written to; not a path if standard error is no
    file, and empty where /proc does not exist."""
    node: str
    """Ray's id of its node."""


class _HostBase:
    """Common part of `SyncHost` and `AsyncHost`."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """Set environment variables, start a reaper for this process and the thread that gives
        memory back; hide triton if `WITHOUT_TRITON` is set.

        Args:
            secrets: variables that come by this way, because Ray logs those of a runtime
                environment.
        """
        add_to_environment(secrets)
        start_reaper(f"{WORKER_TOKEN}={os.environ[WORKER_TOKEN]}", tracker=True)
        give_back_each_minute()
        if WITHOUT_TRITON in os.environ:
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        self._worker: Worker | None = None

    def _about(self) -> HostInfo:
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
        node = ray.get_runtime_context().get_node_id()
        pid = os.getpid()
        return HostInfo(pid, started(pid), ray.util.get_node_ip_address(), log, node)

    def _build(
        self,
        worker_cls: Callable[..., Worker],
        spec: WorkerSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> RankInfo:
        """Construct and keep the worker, after logging is set up for it; limit its threads as its
        environment says, and return its rank."""
        setup_logging(spec.name)
        worker = worker_cls(spec, *args, **kwargs)
        # The number of cores, or what the role's own variables say; a list is for nested regions.
        worker.platform.set_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
        self._worker = worker
        return worker.rank_info

    def _beat(self) -> list[str]:
        return [] if self._worker is None else self._worker.stopped_processes()

    def _method(self, name: str) -> Callable[..., Any]:
        """Return the method of the worker with this name; `build` comes first."""
        assert self._worker is not None, "build comes first"
        method: Callable[..., Any] = getattr(self._worker, name)
        return method

    def _noted(self, method: str) -> AbstractContextManager[None]:
        """Note a call of the worker while it is profiled."""
        assert self._worker is not None, "build comes first"
        return self._worker.spans.noted(method)

    def _to_send(self, method: str, result: Any) -> Any:
        """Return the result of a call, or None if the driver does not use that of this rank."""
        assert self._worker is not None, "build comes first"
        unused = dispatch_of(self._method(method)).leaders_only
        return None if unused and not self._worker.rank_info.is_dp_leader else result


class SyncHost(_HostBase):
    """A host that runs one call at a time, in one thread."""

    def about(self) -> HostInfo:
        return self._about()

    def free_port(self) -> int:
        return free_port()

    def build(self, *given: Any) -> RankInfo:
        return self._build(*given)

    def run(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Return the result of the worker's method; None if the driver does not use that of this
        rank. Ray replaces references among `args`, but not in `kwargs`, by their values."""
        with self._noted(method):
            return self._to_send(method, self._method(method)(*args, **kwargs))

    def beat(self) -> list[str]:
        """Return the names of stopped processes that the worker needs. Runs in `BESIDE_GROUP`."""
        return self._beat()

    def watch(self) -> None:
        """Block for ever, so that the call ends only with the process. Runs in `WATCH_GROUP`."""
        threading.Event().wait()


class AsyncHost(_HostBase):
    """A host that runs all calls on one event loop. The worker is built on the loop, too, so its
    constructor may start tasks."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        super().__init__(secrets)
        self._bundles = BundleHost(self._bundled)

    async def about(self) -> HostInfo:
        return self._about()

    async def free_port(self) -> int:
        return free_port()

    async def build(self, *given: Any) -> RankInfo:
        return self._build(*given)

    async def run(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Return the result of the worker's method, awaited if need be; see `SyncHost.run`."""
        with self._noted(method):
            result = self._method(method)(*args, **kwargs)
            return self._to_send(method, await result if inspect.isawaitable(result) else result)

    async def exchange(
        self, caller: str, calls: Sequence[SentCall]
    ) -> tuple[Bundle, list[Packed] | None]:
        """Begin calls of a bundle, and wait for answers; see `BundleHost`. Ray stores both parts of
        the result apart from each other."""
        self._bundles.begin(caller, calls)
        return await self._bundles.collect(caller)

    async def begin(self, caller: str, calls: Sequence[SentCall]) -> None:
        """Begin calls of a bundle, while another call collects the answers."""
        self._bundles.begin(caller, calls)

    async def recover(self, caller: str) -> set[int]:
        """Make the answers ready again that did not arrive; see `BundleHost.recover`."""
        return self._bundles.recover(caller)

    async def _bundled(self, call: SentCall) -> tuple[Any, Apart | None]:
        """Run a call of a bundle; return its result, and how to divide it (None: not at all)."""
        result = await self.run(call.method, call.kwargs, *call.args)
        return result, dispatch_of(self._method(call.method)).apart

    async def beat(self) -> list[str]:
        """Return the names of stopped processes that the worker needs. Runs in `BESIDE_GROUP`,
        which has its own event loop."""
        return self._beat()

    async def watch(self) -> None:
        """Wait for ever, so that the call ends only with the process. Runs in `WATCH_GROUP`."""
        await asyncio.Event().wait()
