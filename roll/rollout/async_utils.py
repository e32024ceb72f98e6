"""Several coroutines at once, of which none outlives the others' failure or the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. After a failure the others are stopped, and it is raised as itself.

    A TaskGroup would wrap it, and the reason of a run's end would no longer be a `RollError`.
    """
    return await first_done(work, len(work))


async def first_done(work: Sequence[Coroutine[Any, Any, T]], count: int) -> list[T]:
    """The results of the `count` that end first, in the order of `work`; the others are stopped.

    After a failure all are stopped, and it is raised as itself.
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
                task.result()  # raises what it raised
            done |= ended
        return [task.result() for task in running if task in done][:count]
    finally:
        await _stop(running)


async def _all(running: Sequence[asyncio.Future[T]]) -> list[T]:
    """One callback for each; asking again at each end costs the square of their number."""
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        await _stop(running)
        raise


async def _stop(running: Sequence[asyncio.Future[T]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
