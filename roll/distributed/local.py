"""`LocalCluster`: the same interface in this process, for tests, debuggers and one-process runs.

Ranks run one after the other, so their methods must not talk to each other. Asynchronous workers
live on an event loop in a thread of its own, as they do in an actor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, NoReturn

from roll.core.errors import RollError, WaitTimeoutError, WorkerError, WorkerLostError
from roll.core.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Cluster, P, Placement, W, ranks_name
from roll.distributed.dispatch import Call
from roll.distributed.pending import Answers
from roll.distributed.worker import is_async
from roll.platform.machine import cores, free_port

LOGGER = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 10.0
"""For the calls and the closing of a worker that is given up."""


class LocalLauncher:
    """Starts local clusters. Pools are not looked at; every role has `world_size` ranks."""

    def __init__(
        self, *, world_size: int = 1, platform: str = "cpu", call_timeout_s: float = 3600
    ) -> None:
        self._world_size = world_size
        self._platform = platform
        self._call_timeout_s = call_timeout_s
        self._clusters: list[LocalCluster[Any]] = []

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LocalCluster[W]:
        # A worker that is alone may still make a process group.
        rendezvous = f"127.0.0.1:{free_port()}"
        world_size = placement.workers or self._world_size
        specs = [
            WorkerSpec(
                role=placement.role,
                rank=rank,
                world_size=world_size,
                devices=tuple(range(placement.per_worker)),
                cores=cores(),
                node=0,
                rendezvous=rendezvous,
                seed=placement.seed,
                platform=self._platform,
                label=placement.label,
            )
            for rank in range(world_size)
        ]
        build = [partial(worker_cls, spec, *args, **kwargs) for spec in specs]
        asynchronous = isinstance(worker_cls, type) and is_async(worker_cls)
        loop = LoopThread(f"roll-local-{placement.name}") if asynchronous else None
        cluster = LocalCluster(placement, build, loop, self._call_timeout_s)
        self._clusters.append(cluster)
        return cluster

    def close(self, *, graceful: bool = True) -> None:
        with ExitStack() as undo:  # newest first; one that fails does not keep the others open
            for cluster in self._clusters:
                undo.callback(cluster.close, graceful=graceful)
            self._clusters = []

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(eq=False)
class _Seat(Generic[W]):
    """A rank's worker and what it is doing."""

    worker: W
    replaced: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Asynchronous calls that run; touched on the loop only."""

    def lost(self) -> WorkerLostError:
        spec = self.worker.spec
        return WorkerLostError(
            f"{spec.name} was ended, to be restarted", spec.role, spec.label, spec.rank
        )

    async def call(self, bound: Callable[..., Any], call: Call) -> Any:
        """Call on the loop; await what it returns if it can be awaited."""
        if self.replaced:
            raise self.lost()
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            result = bound(*call.args, **call.kwargs)
            return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            if self.replaced:
                raise self.lost() from None
            raise
        finally:
            self.tasks.discard(task)

    async def leave(self) -> None:
        """End what runs, and close the worker; it may be broken, and then only says so."""
        self.replaced = True
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=LEAVE_TIMEOUT_S)
        try:
            closing = self.worker.close()
            if closing is not None:
                await asyncio.wait_for(closing, LEAVE_TIMEOUT_S)
        except Exception:
            LOGGER.warning("%s: closing failed", self.worker.spec.name, exc_info=True)


async def _on_loop(make: Callable[[], W]) -> W:
    return make()


class LocalCluster(Cluster[W], Generic[W]):
    """Workers in this process."""

    def __init__(
        self,
        placement: Placement,
        build: Sequence[Callable[[], W]],
        loop: LoopThread | None,
        call_timeout_s: float,
    ) -> None:
        self._placement = placement
        self._build = build
        self._loop = loop
        self._seats = [self._seat(rank) for rank in range(len(build))]
        ranks = [worker.rank_info for worker in self.workers]
        super().__init__(placement.role, ranks, call_timeout_s, placement.label)
        self._closed = False

    @property
    def workers(self) -> tuple[W, ...]:
        """The workers themselves, for a debugger or a test."""
        return tuple(seat.worker for seat in self._seats)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(rank for rank, seat in enumerate(self._seats) if seat.replaced)

    def restart(self, rank: int) -> None:
        """As in an actor, but what runs is cancelled instead of killed."""
        if not self._placement.replaceable:
            raise ValueError(f"{self.name}: only workers that are replaceable can be restarted")
        leaving = self._seats[rank].leave()
        if self._loop:
            try:
                self._loop.submit(leaving).result(3 * LEAVE_TIMEOUT_S)
            except TimeoutError:
                raise WaitTimeoutError(
                    f"waited {3 * LEAVE_TIMEOUT_S:g} s for rank {rank} of {self.name} to end: "
                    "a method blocks its event loop"
                ) from None
        else:
            asyncio.run(leaving)
        self._seats[rank] = self._seat(rank)

    def close(self, *, graceful: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if graceful:
                self._start("close", [Call(())] * self.world_size).collect(self.call_timeout_s)
        finally:
            if self._loop:
                self._loop.close()

    def _seat(self, rank: int) -> _Seat[W]:
        make = self._build[rank]
        return _Seat(self._loop.submit(_on_loop(make)).result() if self._loop else make())

    def _start_on(self, ranks: Sequence[int], method: str, calls: Sequence[Call]) -> Answers:
        futures = [self._run(rank, method, call) for rank, call in zip(ranks, calls, strict=True)]
        names = [self._seats[rank].worker.spec.name for rank in ranks]
        name = ranks_name(self._placement.name, ranks)
        return LocalAnswers(name, method, names, futures)

    def _ask(self, rank: int, method: str, call: Call) -> Awaitable[Any]:
        future = self._run(rank, method, call)
        return self._answer(self._seats[rank].worker.spec.name, method, future)

    async def _answer(
        self, worker: str, method: str, future: concurrent.futures.Future[Any]
    ) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:  # noqa: BLE001 - a worker's method, as behind an actor
            raise_as_worker_error(error, f"{worker}.{method}")

    def _run(self, rank: int, method: str, call: Call) -> concurrent.futures.Future[Any]:
        seat = self._seats[rank]
        bound: Callable[..., Any] = getattr(seat.worker, method)
        if self._loop:
            return self._loop.submit(seat.call(bound, call))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(bound(*call.args, **call.kwargs))
        except Exception as error:  # noqa: BLE001 - raised again by whoever collects
            future.set_exception(error)
        return future


class LocalAnswers:
    """Results of one call, as futures."""

    def __init__(
        self,
        cluster: str,
        method: str,
        names: Sequence[str],
        futures: Sequence[concurrent.futures.Future[Any]],
    ) -> None:
        self._cluster = cluster
        self._method = method
        self._names = names
        self._futures = futures

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def poll(self, timeout_s: float) -> bool:
        finished = concurrent.futures.wait(
            self._futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION
        ).done
        for name, future in zip(self._names, self._futures, strict=True):
            error = future.exception() if future in finished else None
            if isinstance(error, Exception):
                raise_as_worker_error(error, f"{name}.{self._method}")
        return len(finished) == len(self._futures)

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {timeout_s:g} s for {self._cluster}.{self._method}")

    def collect(self, timeout_s: float) -> list[Any]:
        if not self.poll(timeout_s):
            raise self.overdue(timeout_s)
        return [future.result() for future in self._futures]


def raise_as_worker_error(error: Exception, what: str) -> NoReturn:
    """What a Ray cluster would raise: a `RollError` as it is, anything else as `WorkerError`."""
    if isinstance(error, RollError):
        raise error
    trace = "".join(traceback.format_exception(error))
    raise WorkerError(f"{what} raised {type(error).__name__}: {error}\n{trace}") from error
