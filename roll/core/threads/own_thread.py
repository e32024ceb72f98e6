"""Blocking calls, each in a new daemon thread.

Unlike a call in a thread pool, such a call does not wait for a free thread. If a call never
returns, its daemon thread does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a new daemon thread; return what `work` returns, or raise what `work` raises.

    Cancelling the wait does not end `work`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        """Settle the future, on the loop's thread; do nothing if the wait was cancelled."""
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        """Run `work` in the new thread and pass its result or exception to the loop, unless the
        loop is closed."""
        result, error = None, None
        try:
            result = work(*args, **kwargs)
        except BaseException as caught:  # noqa: BLE001 - the waiting coroutine raises it
            error = caught
        with suppress(RuntimeError):  # the loop is closed, so no coroutine waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=f"roll-{work.__name__}", daemon=True).start()
    return await future


def run_in_parallel(calls: Sequence[Callable[[], object]]) -> None:
    """Make all calls at the same time, each in its own thread, and return when all have ended.

    A single call runs in the thread of the caller. Exceptions after the first are dropped.

    Raises:
        BaseException: the exception of the first failed call, in the order of `calls`.
    """
    if len(calls) == 1:
        calls[0]()
        return
    ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()

    def make(place: int) -> None:
        try:
            calls[place]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            ended.put((place, error))
        else:
            ended.put((place, None))

    for place in range(len(calls)):
        threading.Thread(target=make, args=(place,), name=f"roll-{place}", daemon=True).start()
    errors = sorted((ended.get() for _ in calls), key=lambda each: each[0])
    for _, error in errors:
        if error is not None:
            raise error
