"""A time limit for coroutines that may turn out to block the loop they run on.

They run on a loop of their own, so the caller's goes on, and its timers ring whatever they do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from roll.core.loop_thread import LoopThread

POLL_S = 0.01


class BlockedLoopError(Exception):
    """A coroutine holds the loop: no other one gets a turn, and no time limit reaches it."""


async def run_bounded(
    loop: LoopThread, make: Callable[[], Awaitable[Any]], timeout_s: float | None
) -> Any:
    """What `make()` gives when it is awaited on `loop`.

    Raises:
        TimeoutError: it took longer, and was cancelled.
        BlockedLoopError: it took longer, and for as long again the loop answered nobody.
    """

    async def call() -> Any:
        return await make()

    future = loop.submit(call())
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    except TimeoutError:
        # The function may itself raise TimeoutError.
        if timeout_s is not None and not (future.done() and not future.cancelled()):
            await _expect_life(loop, timeout_s)
        raise


async def _expect_life(loop: LoopThread, timeout_s: float) -> None:
    turn = loop.submit(asyncio.sleep(0))
    begun = time.monotonic()
    while not turn.done():
        if time.monotonic() - begun > timeout_s:
            raise BlockedLoopError(f"no other coroutine had a turn for {timeout_s:g} s more")
        await asyncio.sleep(POLL_S)
