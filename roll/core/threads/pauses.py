"""`Pauses`: waits that do not count against a time limit, because others are the cause of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Pauses:
    """Waits during which the time of a limit stands still. Any thread may call all methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits = 0
        """Number of waits that are under way."""
        self._told: list[Callable[[bool], None]] = []

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Let time stand still during the block."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def telling(self, tell: Callable[[bool], None]) -> Iterator[None]:
        """Call `tell` now, and at each change during the block, with whether time stands still. It
        must not wait."""
        with self._lock:
            self._told.append(tell)
            tell(self._waits > 0)
        try:
            yield
        finally:
            with self._lock:
                self._told.remove(tell)

    def _change(self, by: int) -> None:
        """Add to the number of waits, and tell if time stands still or goes on from now."""
        with self._lock:
            stood = self._waits > 0
            self._waits += by
            if stood is not (self._waits > 0):
                for tell in self._told:
                    tell(self._waits > 0)


async def wait_within(
    future: asyncio.Future[Any], timeout_s: float | None, pauses: Pauses | None
) -> Any:
    """Wait for a future as `asyncio.wait_for` does, but do not count the pauses.

    Args:
        future: what to wait for; it is cancelled at the time limit.
        timeout_s: time limit in seconds; None sets none.
        pauses: waits that do not count; None: all time counts.
    """
    if timeout_s is None or pauses is None:
        return await asyncio.wait_for(future, timeout_s)
    loop, left_s, over = asyncio.get_running_loop(), timeout_s, False
    async with asyncio.timeout(timeout_s) as limit:

        def set_clock(still: bool) -> None:
            """Stop the limit, or let it go on with the time that was left."""
            nonlocal left_s
            due_s = limit.when()
            if over or limit.expired():
                return
            if still and due_s is not None:
                left_s = due_s - loop.time()
                limit.reschedule(None)
            elif not still and due_s is None:
                limit.reschedule(loop.time() + left_s)

        def tell(still: bool) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(set_clock, still)

        with pauses.telling(tell):
            try:
                return await future
            finally:
                over = True
