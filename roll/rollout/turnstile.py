"""Who may send now: a bound on the sum of sizes, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turnstile:
    """Lets sizes in that add up to at most `capacity`; a larger one goes in alone.

    Nobody overtakes: a large one would wait for ever behind small ones that still fit. All calls
    come from one event loop.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def inside(self, size: int) -> AsyncIterator[None]:
        """Wait for the turn; the wait ends when those ahead have left."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._inside -= size
            else:
                turn.cancel()  # whoever lies cancelled in the queue is passed over
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if not turn.cancelled():
                if self._inside and self._inside + size > self._capacity:
                    return
                self._inside += size
                turn.set_result(None)
            self._queue.popleft()
