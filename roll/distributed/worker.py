"""`Worker`: what every role's worker is; one instance per rank, in a process of its own or not."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable

from roll.core.types import RankInfo, WorkerSpec
from roll.platform import get_platform
from roll.platform.base import Platform
from roll.platform.machine import GIB
from roll.platform.processes import tree_rss_bytes


class Worker:
    """Subclasses add one method per thing the driver asks for.

    A class with a public `async def` method runs on an event loop: all its methods share that loop,
    and its asynchronous ones run concurrently. Every other class runs one call at a time.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.platform: Platform = get_platform(spec.platform)

    @property
    def rank_info(self) -> RankInfo:
        """Every rank is data-parallel; a worker whose strategy splits the model says otherwise."""
        return RankInfo(self.spec.rank, self.spec.rank, self.spec.world_size, is_dp_leader=True)

    def ping(self) -> str:
        """The worker's name, to see that it answers."""
        return self.spec.name

    def memory_gb(self) -> float:
        """Resident memory of this process and its children, in GiB."""
        return tree_rss_bytes(os.getpid()) / GIB

    def stopped_processes(self) -> list[str]:
        """Names of the processes below this one without which it cannot work, and which somebody
        has stopped. Asked with each heartbeat, in another thread than the other methods."""
        return []

    def close(self) -> Awaitable[None] | None:
        """Let go of engines, files and process groups; called once, at a normal end.

        Here there is nothing to let go of. A default process group may be in use by other workers
        of the process: who joins it directly leaves it, strategies do so by `GroupMembership`.
        Asynchronous workers may declare it `async def`; whoever calls it awaits what it returns.
        After a failure the process is simply killed, and its children with it.
        """
        return None


def is_async(worker_cls: type) -> bool:
    """Whether a public method of the class is a coroutine function."""
    return any(
        inspect.iscoroutinefunction(member)
        for name, member in inspect.getmembers(worker_cls)
        if not name.startswith("_")
    )
