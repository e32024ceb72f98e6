"""`WaitingLine`: requests that wait for a replica, in the order of their arrival; a replica with
room takes those first whose prefix it has."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from roll.core.types import GenerateRequest
from roll.rollout.fleet.replica import Replica

PATIENCE = 4
"""Number of requests per replica that may get a place before one that was there earlier. Its own
replica has a place for it sooner, unless that is overloaded or hangs."""


@dataclass(eq=False, slots=True)
class Waiting:
    """Request that waits for a replica."""

    session: str
    request: GenerateRequest
    seat: asyncio.Future[Replica]
    moved: bool
    """True if the request ran on another replica before."""
    latest: int = 0
    """Number of places that may be given away before this request must get one."""
    left: bool = False
    """True if it waits no more."""


@dataclass
class WaitingLine:
    """Requests that wait. A request keeps its place in the order of arrival but for `PATIENCE`."""

    replicas: int
    """Number of replicas."""
    _order: deque[Waiting] = field(default_factory=deque, init=False)
    """All that wait, and some that have left."""
    _own: dict[int, deque[Waiting]] = field(default_factory=dict, init=False)
    """The same for each replica that has the prefixes of some."""
    _arrived: int = field(default=0, init=False)
    _served: int = field(default=0, init=False)

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        self._drop_cancelled()
        return bool(self._order)

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return sum(not (one.left or one.seat.done()) for one in self._order)

    def add(self, one: Waiting, home: int | None) -> None:
        """Let a request wait: behind all others; before them if it was moved.

        Args:
            home: replica that has its prefix; None if there is none.
        """
        if one.moved:
            self._order.appendleft(one)
            return
        one.latest = self._arrived + PATIENCE * self.replicas
        self._arrived += 1
        self._order.append(one)
        if home is not None:
            own = self._own.setdefault(home, deque())
            self._drop_left(own)  # of a replica that is gone, nobody else does
            own.append(one)

    def next_for(self, replica: int) -> Waiting | None:
        """Return the request that a replica with room takes next, which stays in line: the first
        one if it was moved or has let enough others pass, else the first whose prefix the replica
        has, else the first. None if none waits."""
        self._drop_cancelled()
        if not self._order:
            return None
        first = self._order[0]
        own = self._own.get(replica)
        if own is None or first.moved or first.latest <= self._served:
            return first
        self._drop_left(own)
        return own[0] if own else first

    def serve(self, one: Waiting) -> None:
        """Take a request out of the line, which gets a place."""
        one.left = True
        self._served += not one.moved

    def clear(self) -> list[Waiting]:
        """Take all requests out of the line; return them in order."""
        found = [one for one in self._order if not (one.left or one.seat.done())]
        self._order.clear()
        self._own.clear()
        return found

    def _drop_cancelled(self) -> None:
        """Forget those at the head of the order that wait no more. One that was cancelled counts as
        one that got a place, since all behind it counted it when they arrived."""
        while self._order and (self._order[0].left or self._order[0].seat.done()):
            one = self._order.popleft()
            self._served += not (one.left or one.moved)

    @staticmethod
    def _drop_left(line: deque[Waiting]) -> None:
        """Forget those at the head of a line that wait no more, also because they were
        cancelled."""
        while line and (line[0].left or line[0].seat.done()):
            line.popleft()
