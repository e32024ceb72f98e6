"""An event loop in a thread of its own, for coroutines that may turn out to block.

The caller's own loop goes on, so its timers ring whatever the coroutines do.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.01


class BlockedLoopError(Exception):
    """A coroutine holds the loop: no other one gets a turn, and no time limit reaches it."""


class LoopThread:
    """Runs coroutines; started at the first call, ends with `close` or with the interpreter."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, make: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Any:
        """What `make()` gives when it is awaited in the thread.

        Raises:
            TimeoutError: it took longer, and was cancelled.
            BlockedLoopError: it took longer, and for as long again the loop answered nobody.
        """
        loop = self._start()

        async def call() -> Any:
            return await make()

        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            # The function may itself raise TimeoutError.
            if timeout_s is not None and not (future.done() and not future.cancelled()):
                await _expect_life(loop, timeout_s)
            raise

    def close(self) -> None:
        """Cancel what runs and end the thread; a blocked one is left behind."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_serve, args=(self._loop,), name=self._name, daemon=True
            ).start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what is left at its end
        runner.get_loop().run_forever()


async def _expect_life(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    alive = threading.Event()
    loop.call_soon_threadsafe(alive.set)
    begun = time.monotonic()
    while not alive.is_set():
        if time.monotonic() - begun > timeout_s:
            raise BlockedLoopError(f"no other coroutine had a turn for {timeout_s:g} s more")
        await asyncio.sleep(POLL_S)
