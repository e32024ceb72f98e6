"""`FairLock`: a lock that threads and coroutines wait for in the order in which they came."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

POLL_S = 0.05
"""How often a coroutine looks; one that blocked its loop, or a thread, could not be cancelled."""


class FairLock:
    """Held by one at a time. Who comes again and again, as a trainer does with each step, waits
    behind those who came meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """Whose turn it is comes first."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """For threads."""
        ticket = self._come()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is ticket)
            yield
        finally:
            self._leave(ticket)

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """For coroutines."""
        ticket = self._come()
        try:
            while self._queue[0] is not ticket:
                await asyncio.sleep(POLL_S)
            yield
        finally:
            self._leave(ticket)

    def _come(self) -> object:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
        return ticket

    def _leave(self, ticket: object) -> None:
        with self._changed:
            self._queue.remove(ticket)
            self._changed.notify_all()
