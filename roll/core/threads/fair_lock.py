"""`FairLock`: a lock that threads and coroutines get in the order in which they asked for it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

POLL_S = 0.05
"""Time between two looks of a waiting coroutine at the queue, in seconds. The coroutine polls
because a wait that blocked the event loop, or a thread, could not be cancelled."""


class FairLock:
    """A lock with one holder at a time, given out in the order of arrival. A holder that releases
    the lock and asks again, as a trainer does in each step, comes after those who already wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """Tickets of the holder (first) and of those who wait, in the order of arrival."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside the block; for threads. Block until it is this thread's turn."""
        ticket = self._come()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is ticket)
            yield
        finally:
            self._leave(ticket)

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """Hold the lock inside the block; for coroutines. Wait without blocking the event loop."""
        ticket = self._come()
        try:
            while self._queue[0] is not ticket:
                await asyncio.sleep(POLL_S)
            yield
        finally:
            self._leave(ticket)

    def _come(self) -> object:
        """Put a new ticket at the end of the queue and return it."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
        return ticket

    def _leave(self, ticket: object) -> None:
        """Remove a ticket, of the holder or of one who waits, and wake the threads that wait."""
        with self._changed:
            self._queue.remove(ticket)
            self._changed.notify_all()
