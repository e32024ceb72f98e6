"""Asyncio event loop in virtual time: instead of sleeping, the clock jumps to the next event.

Code that waits by `loop.time()`, `call_at` or `asyncio.sleep` runs unchanged, as fast as the CPU
allows, and in the same order every time. The events of the simulated world run in the loop's
selector, where a real loop would receive news from outside. So their CPU time can be measured
separately from that of the tested code.
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
    """Deadlock: tasks wait, but no event or timer is planned that could wake any of them."""


@dataclass(order=True, slots=True)
class Event:
    """Planned event of the simulated world."""

    when_s: float
    """Time of the event, in virtual seconds."""
    number: int
    """Number in the order of planning. Of two events at the same time, the one with the smaller
    number comes first."""
    action: Callable[[], None] | None = field(compare=False)
    """Function that the event runs; None if the event is cancelled."""

    def cancel(self) -> None:
        self.action = None


class _World(selectors.SelectSelector):
    """Selector that waits for no files. Instead of waiting, it runs the planned events that are
    due, or moves the clock on by the time that it should wait."""

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
    """Event loop in virtual time, which begins at 0. It never waits for threads or sockets, so code
    that depends on them does not work in it."""

    def __init__(self) -> None:
        self._world = _World()
        super().__init__(self._world)

    @property
    def meter(self) -> Meter:
        """Meter of the CPU time of the world's events, and of all other code that enters it."""
        return self._world.meter

    def hear(self) -> None:
        """Let tasks run after the current event. Call this in an event that makes a task ready;
        without this call, the next event follows at once."""
        self._world.heard = True

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._world.now_s

    def happen(self, when_s: float, action: Callable[[], None]) -> Event:
        """Plan an event of the world.

        Args:
            when_s: virtual time of the event; a time in the past means at once.
            action: function that the event runs.
        """
        self._world.planned += 1
        event = Event(when_s, self._world.planned, action)
        heapq.heappush(self._world.events, event)
        return event


def virtual_loop() -> VirtualLoop:
    """Return the running event loop, which must be a `VirtualLoop`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "the world is simulated inside run_virtually only"
    return loop


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time.

    Raises:
        StuckError: `main` waits for something that cannot happen any more.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
