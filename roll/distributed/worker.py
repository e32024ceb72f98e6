"""`Worker`: base class of the workers of all roles, with one instance per rank."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import ClassVar

from roll.config.sections.lifecycle import ProfileKind
from roll.core.timing import Span, SpanRecorder
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.dispatch import JOIN, dispatch
from roll.distributed.profilers import Profiler, begin_profiler
from roll.platform import get_platform
from roll.platform.base import Platform
from roll.platform.machine import GIB
from roll.platform.processes import tree_rss_bytes
from roll.platform.usage import WorkerUse, use_of_gpus, use_of_machine


class Worker:
    """Base class of all workers. A subclass adds the methods that the driver calls.

    A class with a public `async def` method runs on an event loop: all its methods share that loop,
    and its asynchronous methods run concurrently. Any other class runs one call at a time. On Ray,
    each worker has its own process.
    """

    starts_processes: ClassVar[bool] = False
    """True if workers of this class start processes that need the same slow imports."""
    follower: ClassVar[type[Follower] | None] = None
    """Class of the further parts of a worker that lies on several nodes. They are built with the
    same arguments, and a spec of their own. None: all devices of a worker are on one node."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.platform: Platform = get_platform(spec.platform)
        self.spans = SpanRecorder()
        """Recorder of the calls of this worker's methods."""
        self._profiler: Profiler | None = None

    @property
    def rank_info(self) -> RankInfo:
        """Position of this rank. By default every rank is data-parallel; workers whose strategy
        splits the model over ranks override this."""
        return RankInfo(self.spec.rank, self.spec.rank, self.spec.world_size, is_dp_leader=True)

    def ping(self) -> str:
        """Return the worker's name. The driver calls this to test whether the worker answers."""
        return self.spec.name

    def memory_gb(self) -> float:
        """Return the resident memory of this process and all its descendants, in GiB."""
        return tree_rss_bytes(os.getpid()) / GIB

    @dispatch(JOIN)
    def usage(self) -> list[WorkerUse]:
        """Return what this worker uses now. The driver calls this through `Cluster.beside`, from
        time to time, and gets the lists of all ranks joined."""
        gpus = use_of_gpus(self.spec.devices) if self.spec.platform == "cuda" else []
        return [WorkerUse(tree_rss_bytes(os.getpid()), use_of_machine(), gpus)]

    def begin_profile(self, kind: ProfileKind | None) -> None:
        """Begin to note the calls of this worker.

        Args:
            kind: what is recorded inside the calls, too; None: nothing.
        """
        self.spans.begin()
        if kind is not None:
            self._profiler = begin_profiler(kind)

    def end_profile(self, folder: Path) -> list[Span]:
        """Return the calls that ended since `begin_profile`. What was recorded inside them is
        written into `folder`, into a file with the worker's name."""
        spans = self.spans.end()
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.end(folder, self.spec.name)
        return spans

    def stopped_processes(self) -> list[str]:
        """Return names of descendant processes that the worker needs and that a signal has stopped.

        Called with each heartbeat, in a different thread from the other methods. By default a
        worker needs no other processes.
        """
        return []

    def close(self) -> Awaitable[None] | None:
        """Release engines, files and process groups. Called once, at a normal end of the worker.

        The base class has nothing to release. It does not leave the default process group, because
        other workers of the process may use the group: code that joined the group leaves it, and
        strategies do so with `GroupMembership`. Asynchronous workers may declare this method
        `async def`; the caller awaits the result. After a failure this method is not called: the
        process and its children are killed.
        """
        return None


class Follower(Worker, ABC):
    """Part of a worker on a further node. The driver calls the first part alone."""

    @abstractmethod
    async def follow(self) -> None:
        """Do what the first part asks for, until this part is closed or fails.

        Raises:
            RollError: this part can work no more; the message says why. All parts are ended then.
        """


def is_async(worker_cls: type) -> bool:
    """Return whether the class has a public method that is a coroutine function."""
    return any(
        inspect.iscoroutinefunction(member)
        for name, member in inspect.getmembers(worker_cls)
        if not name.startswith("_")
    )
