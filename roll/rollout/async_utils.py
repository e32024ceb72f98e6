"""Functions that run several coroutines at once and stop all of them on failure or cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


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
    """
    if len(work) == count == 1:
        return [await work[0]]
    running = [asyncio.ensure_future(each) for each in work]
    if len(work) == count:
        return await _all(running)
    done: set[asyncio.Future[T]] = set()
    try:
        while len(done) < count:
            ended, _ = await asyncio.wait(set(running) - done, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises the exception of the task, if it has one
            done |= ended
        return [task.result() for task in running if task in done][:count]
    finally:
        await _stop(running)


async def _all(running: Sequence[asyncio.Future[T]]) -> list[T]:
    """Wait for all futures with `gather`, which adds one callback to each.

    Calling `asyncio.wait` again after each end would cost the square of the number of futures.
    """
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        await _stop(running)
        raise


async def _stop(running: Sequence[asyncio.Future[T]]) -> None:
    """Cancel all futures and wait until they have ended; ignore their results and errors."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
