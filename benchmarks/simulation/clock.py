"""An asyncio event loop whose time is virtual: where others sleep, it jumps to what comes next.

Everything that waits by `loop.time()`, `call_at` or `asyncio.sleep` runs in it unchanged, as fast
as the CPU allows, and in the same order every time. What happens in the simulated world comes from
the selector, as news from outside do, and its CPU time is kept apart from that of the code which
hears of it.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.simulation.meter import Meter

T = TypeVar("T")


class StuckError(RuntimeError):
    """Tasks wait, but nothing is ready or will ever happen: none of them can go on."""


@dataclass(order=True, slots=True)
class Event:
    """Something that is going to happen in the world."""

    when_s: float
    number: int
    """Of equal moments the first one planned comes first."""
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        self.action = None


class _World(selectors.SelectSelector):
    """Waits for no file: it lets things happen, or the time pass that it is asked to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.meter = Meter()
        self.heard = False
        self.planned = 0
        self.events: list[Event] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:
            return []
        until_s = math.inf if timeout is None else self.now_s + timeout
        with self.meter:
            self.heard = False
            while not self.heard and self.events and self.events[0].when_s <= until_s:
                event = heapq.heappop(self.events)
                if event.action is not None:
                    self.now_s = max(self.now_s, event.when_s)
                    event.action()
            if not self.heard:
                if timeout is None:
                    raise StuckError("nothing is ready or going to happen: an endless wait")
                self.now_s = until_s
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and sockets have no place in it: it never waits for them."""

    def __init__(self) -> None:
        self._world = _World()
        super().__init__(self._world)

    @property
    def meter(self) -> Meter:
        """CPU time of the world's events, and of whoever else enters it."""
        return self._world.meter

    def hear(self) -> None:
        """To be called by an event of which the code learns: until then the world goes on alone."""
        self._world.heard = True

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._world.now_s

    def happen(self, when_s: float, action: Callable[[], None]) -> Event:
        """Let something happen in the world at this moment; at once if it has passed."""
        self._world.planned += 1
        event = Event(when_s, self._world.planned, action)
        heapq.heappush(self._world.events, event)
        return event


def virtual_loop() -> VirtualLoop:
    """The running one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "the world is simulated inside run_virtually only"
    return loop


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time.

    Raises:
        StuckError: `main` waits for something that cannot happen any more.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
