"""Several coroutines at once, all of which stop on failure or cancellation; a coroutine that can be
ended; and a time limit that many tasks share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar

from roll.core.errors import WaitTimeoutError

T = TypeVar("T")

LOOK_S = 0.2
"""Time between two looks of `ended_by`, in seconds."""


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results, in order.

    After the first failure the other coroutines are stopped, and the original exception is raised.
    A TaskGroup would wrap the exception, and a run that ends with a `RollError` would report an
    ExceptionGroup instead.
    """
    return await first_done(work, len(work))


async def first_done(work: Sequence[Coroutine[Any, Any, T]], count: int) -> list[T]:
    """Run all coroutines; return the results of the first `count` to end, in the order of `work`.

    The other coroutines are stopped. After a failure all are stopped, and the original exception is
    raised.

    Args:
        count: number of results, from 1 to the number of coroutines; without coroutines the result
            is empty.
    """
    if len(work) == count == 1:
        return [await work[0]]
    if not work:
        return []
    loop = asyncio.get_running_loop()
    enough: asyncio.Future[None] = loop.create_future()
    results: dict[int, T] = {}  # in the order in which the coroutines ended

    async def run(index: int, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run one coroutine and keep its result; end the wait after the last one needed, or the
        first failure."""
        # A task that reports its end itself costs a turn of the event loop less than a callback.
        try:
            results[index] = await coroutine
        except asyncio.CancelledError:
            enough.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised again by the caller of `first_done`
            if not enough.done():
                enough.set_exception(error)
        else:
            if len(results) >= count and not enough.done():
                enough.set_result(None)

    running = [loop.create_task(run(index, each)) for index, each in enumerate(work)]
    try:
        await enough
    finally:
        if len(results) < len(work):
            await _stop(running)
    # More than `count` may have ended in one turn of the event loop.
    return [results[index] for index in sorted(list(results)[:count])]


async def _stop(running: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel all futures and wait until they have ended; ignore their results and errors."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def ended_by(asked: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
    """Run a coroutine and return its result. As soon as `asked`, which is looked at several times a
    second, returns True, stop the coroutine and return None."""
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            if asked():
                return None
            await asyncio.wait([running], timeout=LOOK_S)
        return running.result()
    finally:
        await _stop([running])


class SharedTimeout:
    """Time limit of the same length for many waits, with one timer for all of them.

    `with limit.wait() as wait:` ends the block with TimeoutError after `seconds`, as
    `asyncio.timeout` does, for a fifth of its CPU time. All calls need one event loop.
    """

    def __init__(self, seconds: float) -> None:
        """Begin without waits; `seconds` is the time limit of each, infinity if there is none."""
        self.seconds = seconds
        self._waits: dict[TimedWait, None] = {}
        """Waits that are under way. They began, and so they expire, in this order."""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> TimedWait:
        """Return the context manager of one wait, for the running task."""
        return TimedWait(self)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """End the block with WaitTimeoutError after `seconds`; `what` begins the message."""
        wait = self.wait()
        try:
            with wait:
                yield
        except TimeoutError as error:
            if not wait.expired:
                raise
            raise WaitTimeoutError(f"{what} did not finish within {self.seconds:g} s") from error

    def begin(self, wait: TimedWait, loop: asyncio.AbstractEventLoop) -> None:
        """Add a wait that begins now on the clock of `loop`, and set its `due_s`; `TimedWait` calls
        this."""
        wait.due_s = loop.time() + self.seconds
        self._waits[wait] = None
        if self._timer is None and wait.due_s < inf:
            self._timer = loop.call_at(wait.due_s, self._expire, loop)

    def end(self, wait: TimedWait) -> None:
        """Remove a wait that has ended; ignore one that is not under way."""
        self._waits.pop(wait, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits that are due; look again when the next one will be."""
        self._timer = None
        while self._waits:
            oldest = next(iter(self._waits))
            if oldest.due_s > loop.time():
                self._timer = loop.call_at(oldest.due_s, self._expire, loop)
                return
            del self._waits[oldest]
            oldest.expire()


class TimedWait:
    """One wait under a `SharedTimeout`; a context manager that can be used once."""

    __slots__ = ("_cancelling", "_limit", "_task", "due_s", "expired")

    def __init__(self, limit: SharedTimeout) -> None:
        self._limit = limit
        self.due_s = inf
        """Time on the clock of the event loop at which the wait ends."""
        self.expired = False

    def expire(self) -> None:
        """End the wait: its task leaves the block with TimeoutError."""
        self.expired = True
        self._task.cancel()

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a wait belongs to a task"
        self._task, self._cancelling = task, task.cancelling()
        self._limit.begin(self, task.get_loop())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._limit.end(self)
        # If the task was cancelled from outside as well, that cancellation goes on.
        outside = self.expired and self._task.uncancel() > self._cancelling
        if self.expired and not outside and kind is asyncio.CancelledError:
            raise TimeoutError from error
