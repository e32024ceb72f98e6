"""`BatchedCalls`: one call for all lists that become ready at almost the same time.

A call to a worker costs about a millisecond on each side, even for little data. Engines finish many
groups in the same decoding step, so the rewards of these groups can share one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class BatchedCalls(Generic[T, R]):
    """Collector that passes the lists of several callers to one function in one call.

    All methods must be called on one event loop.
    """

    call: Callable[[list[T]], Awaitable[Sequence[R]]]
    """Function that returns one result per item, in order."""
    window_s: float = 0.003
    """Time that the first list waits for other lists, in seconds."""
    _waiting: list[tuple[list[T], asyncio.Future[list[R]]]] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, items: list[T]) -> list[R]:
        """Return the results of `items`, in order; if `call` raises, so does `ask` for all callers
        whose items were in that call."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(self.window_s, self._send)
        answer: asyncio.Future[list[R]] = loop.create_future()
        self._waiting.append((items, answer))
        return await answer

    def _send(self) -> None:
        """Start one call for all waiting lists, except those whose callers were cancelled."""
        joined = [(items, answer) for items, answer in self._waiting if not answer.done()]
        self._waiting = []
        if joined:
            task = asyncio.get_running_loop().create_task(self._run(joined))
            self._running.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._running.discard)

    async def _run(self, joined: list[tuple[list[T], asyncio.Future[list[R]]]]) -> None:
        """Call the function once for all lists; give each caller its part of the results, or the
        same exception."""
        try:
            results = list(await self.call([item for items, _ in joined for item in items]))
        except asyncio.CancelledError:
            for _, answer in joined:
                answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - passed on to all callers that wait for it
            for _, answer in joined:
                if not answer.done():
                    answer.set_exception(error)
            return
        start = 0
        for items, answer in joined:
            if not answer.done():
                answer.set_result(results[start : start + len(items)])
            start += len(items)
