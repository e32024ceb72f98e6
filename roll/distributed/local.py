"""`LocalCluster`: the same interface in this process, for tests, debuggers and one-process runs.

Ranks run one after the other, so their methods must not talk to each other. Asynchronous workers
live on an event loop in a thread of its own, as they do in an actor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Concatenate, Generic, NoReturn

from roll.core.errors import RollError, WaitTimeoutError, WorkerError
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Answers, Cluster, P, Placement, W
from roll.distributed.dispatch import Call
from roll.distributed.worker import is_async
from roll.platform.machine import cores, free_port


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
        loop = _LoopThread() if isinstance(worker_cls, type) and is_async(worker_cls) else None
        workers = [loop.run(make).result() if loop else make() for make in build]
        cluster = LocalCluster(placement, workers, loop, self._call_timeout_s)
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


class _LoopThread:
    """An event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="roll-local", daemon=True
        )
        self._thread.start()

    def run(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Call on the loop; await what it returns if it can be awaited."""

        async def on_loop() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        work: Coroutine[Any, Any, Any] = on_loop()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        # A task may block the loop; the thread is a daemon and is then left behind.
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=4)


class LocalCluster(Cluster[W], Generic[W]):
    """Workers in this process."""

    def __init__(
        self,
        placement: Placement,
        workers: Sequence[W],
        loop: _LoopThread | None,
        call_timeout_s: float,
    ) -> None:
        ranks = [worker.rank_info for worker in workers]
        super().__init__(placement.role, ranks, call_timeout_s, placement.label)
        self.workers = tuple(workers)
        """The workers themselves, for a debugger or a test."""
        self._loop = loop
        self._closed = False

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

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        futures = [self._run(rank, method, call) for rank, call in enumerate(calls)]
        return LocalAnswers(self.name, method, [w.spec.name for w in self.workers], futures)

    def _ask(self, rank: int, method: str, call: Call) -> Awaitable[Any]:
        future = self._run(rank, method, call)
        return self._answer(self.workers[rank].spec.name, method, future)

    async def _answer(
        self, worker: str, method: str, future: concurrent.futures.Future[Any]
    ) -> Any:
        try:
            return await asyncio.wrap_future(future)
        except Exception as error:  # noqa: BLE001 - a worker's method, as behind an actor
            raise_as_worker_error(error, f"{worker}.{method}")

    def _run(self, rank: int, method: str, call: Call) -> concurrent.futures.Future[Any]:
        bound: Callable[..., Any] = getattr(self.workers[rank], method)
        if self._loop:
            return self._loop.run(lambda: bound(*call.args, **call.kwargs))
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
