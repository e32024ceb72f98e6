"""Turns at a service: limits on the calls at once and per minute, and pauses that it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Limits of one service; all methods must be called on one event loop."""

    def __init__(self, concurrency: int, per_minute: float | None = None) -> None:
        """Set the limits.

        Args:
            concurrency: largest number of calls at once.
            per_minute: largest number of tries that begin in a minute, at equal distances; None
                sets no limit.
        """
        self._slots = asyncio.Semaphore(concurrency)
        self._gap_s = 60 / per_minute if per_minute else 0.0
        self._next_s = 0.0
        """Time on the loop's clock at which the next try may begin."""
        self._paused_until_s = 0.0

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold one of the places for calls inside the block."""
        async with self._slots:
            yield

    async def begin(self) -> None:
        """Wait until a try may begin; tries begin in the order of these calls."""
        clock = asyncio.get_running_loop().time
        begin_s = max(clock(), self._next_s)
        self._next_s = begin_s + self._gap_s
        while (wait_s := max(begin_s, self._paused_until_s) - clock()) > 0:
            await asyncio.sleep(wait_s)

    def pause(self, wait_s: float) -> None:
        """Let no try begin in the next `wait_s` seconds."""
        until_s = asyncio.get_running_loop().time() + wait_s
        self._paused_until_s = max(self._paused_until_s, until_s)
