"""Time limit for coroutines that may block their event loop.

These coroutines run on a separate event loop, so the loop of the caller and its timers keep working
even if a coroutine blocks. `gives_up` tells their end by the caller from their own CancelledError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from roll.core.threads.loop_thread import LoopThread
from roll.core.threads.pauses import Pauses, wait_within
from roll.core.threads.user_errors import passable

POLL_S = 0.01


class BlockedLoopError(Exception):
    """Error: a coroutine blocks its event loop, so that no other coroutine runs on the loop and no
    time limit can stop the coroutine."""


async def run_bounded(
    loop: LoopThread,
    make: Callable[[], Awaitable[Any]],
    timeout_s: float | None,
    pauses: Pauses | None = None,
) -> Any:
    """Await `make()` on `loop` and return its result, or raise its error, see `passable`.

    Args:
        loop: event loop in a thread.
        make: function that returns the awaitable; it is called on `loop`.
        timeout_s: time limit, in seconds; None sets no limit.
        pauses: waits that do not count against the limit.

    Raises:
        TimeoutError: the awaitable took longer than `timeout_s` and was cancelled.
        BlockedLoopError: the awaitable took longer, and in another `timeout_s` no other coroutine
            could run on `loop`.
    """

    async def call() -> Any:
        try:
            return await make()
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise passable(error) from error

    future = loop.submit(call())
    try:
        return await wait_within(asyncio.wrap_future(future), timeout_s, pauses)
    except TimeoutError:
        # The function may itself raise TimeoutError.
        if timeout_s is not None and not (future.done() and not future.cancelled()):
            await expect_life(loop, timeout_s)
        raise


async def expect_life(loop: LoopThread, timeout_s: float) -> None:
    """Raise BlockedLoopError if a new coroutine on `loop` gets no turn within `timeout_s`."""
    turn = loop.submit(asyncio.sleep(0))
    begun = time.monotonic()
    while not turn.done():
        if time.monotonic() - begun > timeout_s:
            raise BlockedLoopError(f"no other coroutine had a turn for {timeout_s:g} s more")
        await asyncio.sleep(POLL_S)


def gives_up() -> bool:
    """Tell, on CancelledError, whether the current task was cancelled from outside; if not, what
    the task awaited raised the error itself, or was cancelled alone."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
