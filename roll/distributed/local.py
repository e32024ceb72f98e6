"""`LocalCluster`: a cluster in this process, for tests, debuggers and runs with one process.

Each cluster has a thread in which its calls run, so `submit` returns at once, as with Ray actors.
The ranks run one after the other, so methods of different ranks must not wait for each other.
Asynchronous workers run on an event loop in that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Concatenate, Generic

from roll.core.errors import WaitTimeoutError, WorkerLostError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Cluster, P, Placement, W, ranks_name
from roll.distributed.dispatch import Apart, Call
from roll.distributed.local_answers import LocalAnswers, raise_as_worker_error
from roll.distributed.pending import Answers
from roll.distributed.worker import Worker, is_async
from roll.platform.machine import cores, free_port

LOGGER = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 10.0
"""Time limit when a worker is ended, in seconds: first for its running calls, then for its
`close`."""


class LocalLauncher:
    """A launcher that starts clusters in this process. Pools are ignored: every role has
    `world_size` ranks, unless its placement sets `workers`.

    Args:
        call_timeout_s: default time limit of a call to a cluster, in seconds.
    """

    def __init__(self, *, world_size: int = 1, call_timeout_s: float = 3600) -> None:
        self._world_size = world_size
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
        """See `Launcher.start`. Unlike on Ray, an error of a constructor is raised unchanged, and
        constructors have no time limit.

        Raises:
            ValueError: the placement sets environment variables, which all workers would get, or
                has them started by another program.
        """
        if placement.env or placement.under:
            raise ValueError(
                f"{placement.name}: workers of one process cannot have their own env, or another "
                "program that starts them"
            )
        # Even a single worker may create a process group, which needs an address.
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
                platform="cpu",
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
        """Close all clusters, newest first; `graceful`: see `Cluster.close`."""
        with ExitStack() as undo:  # newest first; all are closed, even if one fails
            for cluster in self._clusters:
                undo.callback(cluster.close, graceful=graceful)
            self._clusters = []

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(eq=False)
class _LocalRank(Generic[W]):
    """The worker of one rank and its running calls."""

    worker: W
    replaced: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Running asynchronous calls; read and changed only on the event loop."""

    def lost(self) -> WorkerLostError:
        """Return a new error for calls to the worker after it was ended."""
        spec = self.worker.spec
        return WorkerLostError(
            f"{spec.name} was ended, to be restarted", spec.role, spec.label, spec.rank
        )

    async def call(self, bound: Callable[..., Any], call: Call) -> Any:
        """Run the call on the event loop, and await its result if the result is awaitable.

        Args:
            bound: the worker's method.

        Raises:
            WorkerLostError: the worker was ended, before or during the call.
        """
        if self.replaced:
            raise self.lost()
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with self.worker.spans.noted(bound.__name__):
                result = bound(*call.args, **call.kwargs)
                return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            if self.replaced:
                raise self.lost() from None
            raise
        finally:
            self.tasks.discard(task)

    async def leave(self) -> None:
        """Cancel the running calls and close the worker. If closing fails, only log a warning,
        because the worker may be broken."""
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
    """Make a worker on the event loop that awaits this call: its constructor may start tasks."""
    return make()


class LocalCluster(Cluster[W], Generic[W]):
    """A cluster whose workers are objects in this process."""

    def __init__(
        self,
        placement: Placement,
        build: Sequence[Callable[[], W]],
        loop: LoopThread | None,
        call_timeout_s: float,
    ) -> None:
        """Build all workers. An error of a constructor is raised unchanged.

        Args:
            build: for each rank, the function that builds its worker.
            loop: event loop of asynchronous workers; None: calls run in a new thread.
            call_timeout_s: default time limit of a call, in seconds.
        """
        self._placement = placement
        self._build = build
        self._loop = loop
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None
        """Queue of calls for the cluster's thread, for workers without an event loop; None
        otherwise."""
        if loop is None:
            self._calls = SimpleQueue()
            name = f"roll-local-{placement.name}"
            threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        self._seats: list[_LocalRank[W]] = []
        try:
            for rank in range(len(build)):
                self._seats.append(self._seat(rank))
        except BaseException:
            for rank, seat in enumerate(self._seats):
                self._end(seat, rank)
            self._end_threads()
            raise
        self._restarts = [threading.RLock() for _ in build]
        ranks = [worker.rank_info for worker in self.workers]
        super().__init__(placement.role, ranks, call_timeout_s, placement.label)
        self._closed = False

    @property
    def workers(self) -> tuple[W, ...]:
        """The worker objects, for debuggers and tests."""
        return tuple(seat.worker for seat in self._seats)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset(rank for rank, seat in enumerate(self._seats) if seat.replaced)

    def restart(self, rank: int, timeout_s: float | None = None) -> None:
        """See `Cluster.restart`. Unlike on Ray, running calls are cancelled, not killed; an error
        of the constructor is raised unchanged, and `timeout_s` is ignored."""
        if not self._placement.replaceable:
            raise ValueError(f"{self.name}: only workers that are replaceable can be restarted")
        with self._restarts[rank]:
            self.end(rank)
            self._seats[rank] = self._seat(rank)

    def end(self, rank: int) -> None:
        if not self._placement.replaceable:
            raise ValueError(f"{self.name}: only workers that are replaceable can be ended alone")
        with self._restarts[rank]:
            if not self._seats[rank].replaced:
                self._end(self._seats[rank], rank)

    def _end(self, seat: _LocalRank[W], rank: int) -> None:
        """Cancel the calls of a worker and close it; WaitTimeoutError if a method blocks the event
        loop."""
        leaving = seat.leave()
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

    def close(self, *, graceful: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if graceful:
                self._close_workers()
        finally:
            self._end_threads()

    def _close_workers(self) -> None:
        """Close the workers that live; those that were ended are closed already."""
        living = [rank for rank in range(self.world_size) if rank not in self.lost]
        if living:
            closing = self._start_on(living, "close", [Call(())] * len(living))
            closing.collect(self.call_timeout_s)

    def _end_threads(self) -> None:
        if self._loop:
            self._loop.close()
        if self._calls:
            self._calls.put(None)

    def _seat(self, rank: int) -> _LocalRank[W]:
        """Build a new worker for a rank."""
        make = self._build[rank]
        return _LocalRank(self._loop.submit(_on_loop(make)).result() if self._loop else make())

    def _start_on(self, ranks: Sequence[int], method: str, calls: Sequence[Call]) -> Answers:
        futures = [self._run(rank, method, call) for rank, call in zip(ranks, calls, strict=True)]
        names = [self._seats[rank].worker.spec.name for rank in ranks]
        name = ranks_name(self._placement.name, ranks)
        return LocalAnswers(name, method, names, futures)

    def _ask(self, rank: int, method: str, call: Call, apart: Apart | None) -> Awaitable[Any]:
        future = self._run(rank, method, call)
        return self._answer(self._seats[rank].worker.spec.name, method, future)

    async def _answer(
        self, worker: str, method: str, future: concurrent.futures.Future[Any]
    ) -> Any:
        """Await the result of a call; raise its error as a Ray cluster would."""
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:  # noqa: BLE001 - raised again, as on Ray
            raise_as_worker_error(error, f"{worker}.{method}")

    def _run(self, rank: int, method: str, call: Call) -> concurrent.futures.Future[Any]:
        """Start a method of one rank, on the event loop of async workers or else in the queue of
        calls; return its future."""
        seat = self._seats[rank]
        bound: Callable[..., Any] = getattr(seat.worker, method)
        if self._loop:
            return self._loop.submit(seat.call(bound, call))
        assert self._calls is not None
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        noted = partial(_noted, seat.worker, bound)
        self._calls.put(partial(_run_into, future, partial(noted, *call.args, **call.kwargs)))
        return future

    def _start_beside(self, method: str, calls: Sequence[Call], *, parts: bool) -> Answers:
        """Run the calls in the thread of the caller; all have ended when this method returns."""
        futures = []
        for seat, call in zip(self._seats, calls, strict=True):
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            bound = getattr(seat.worker, method)
            _run_into(future, partial(bound, *call.args, **call.kwargs))
            futures.append(future)
        names = [seat.worker.spec.name for seat in self._seats]
        return LocalAnswers(self.name, method, names, futures)


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the calls of the queue one after the other, until None comes."""
    while _serve_once(calls):
        pass


def _serve_once(calls: SimpleQueue[Callable[[], None] | None]) -> bool:
    """Wait for a call and run it; return False if None comes. The call is forgotten with this
    frame: a waiting thread would keep its arguments."""
    call = calls.get()
    if call is None:
        return False
    call()
    return True


def _noted(worker: Worker, bound: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a worker's method, and note the call while the worker is profiled."""
    with worker.spans.noted(bound.__name__):
        return bound(*args, **kwargs)


def _run_into(future: concurrent.futures.Future[Any], call: Callable[[], Any]) -> None:
    """Run `call` now; its result or exception becomes that of `future`."""
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - the future raises it again
        future.set_exception(error)
