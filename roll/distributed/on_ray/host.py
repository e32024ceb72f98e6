"""The Ray actor around a worker. It is built first and empty, so that errors of a worker's
constructor travel like those of any other method, and its death can be watched from the start.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from roll.core.logs import setup_logging
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.on_ray.environment import WITHOUT_TRITON, WORKER_TOKEN
from roll.distributed.processes.reaper import start_reaper
from roll.distributed.worker import Worker
from roll.platform.machine import free_port

WATCH_GROUP = "watch"
"""Concurrency group of the never-ending call, so that it takes no thread from the others."""

BESIDE_GROUP = "beside"
"""Concurrency group of what is answered while another call runs: heartbeats, and what ends one."""


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Where an actor lives."""

    pid: int
    address: str
    """IP of its node."""
    log: str
    """File that holds its standard error; empty when it is no file."""
    node: str = ""
    """What Ray calls its node."""


class _Room:
    """What both hosts do."""

    def __init__(self) -> None:
        start_reaper(f"{WORKER_TOKEN}={os.environ[WORKER_TOKEN]}")
        if WITHOUT_TRITON in os.environ:
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
        self._worker: Worker | None = None

    def _about(self) -> HostInfo:
        log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
        node = ray.get_runtime_context().get_node_id()
        return HostInfo(os.getpid(), ray.util.get_node_ip_address(), log, node)

    def _build(
        self,
        worker_cls: Callable[..., Worker],
        spec: WorkerSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> RankInfo:
        setup_logging(spec.name)
        worker = worker_cls(spec, *args, **kwargs)
        worker.platform.set_threads(len(spec.cores))
        self._worker = worker
        return worker.rank_info

    def _beat(self) -> list[str]:
        return [] if self._worker is None else self._worker.stopped_processes()

    def _method(self, name: str) -> Callable[..., Any]:
        assert self._worker is not None, "build comes first"
        method: Callable[..., Any] = getattr(self._worker, name)
        return method


class SyncHost(_Room):
    """One call at a time, in one thread."""

    def about(self) -> HostInfo:
        return self._about()

    def free_port(self) -> int:
        return free_port()

    def build(self, *given: Any) -> RankInfo:
        return self._build(*given)

    def run(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        return self._method(method)(*args, **kwargs)

    def beat(self) -> list[str]:
        """What has been stopped below; runs in `BESIDE_GROUP`."""
        return self._beat()

    def watch(self) -> None:
        """Never returns; runs in `WATCH_GROUP`."""
        threading.Event().wait()


class AsyncHost(_Room):
    """Calls share one event loop; the worker is built on it too, so it may start tasks."""

    async def about(self) -> HostInfo:
        return self._about()

    async def free_port(self) -> int:
        return free_port()

    async def build(self, *given: Any) -> RankInfo:
        return self._build(*given)

    async def run(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        result = self._method(method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def beat(self) -> list[str]:
        """What has been stopped below; runs in `BESIDE_GROUP`, on an event loop of its own."""
        return self._beat()

    async def watch(self) -> None:
        """Never returns; runs in `WATCH_GROUP`."""
        await asyncio.Event().wait()
