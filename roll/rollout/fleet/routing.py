"""Routing policies, which choose the replica for the next request."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from roll.rollout.fleet.replica import Replica

MAX_ENTRIES = 4
"""Number of entries per replica, present and old, with which the heap of loads is built anew."""


class Loads:
    """Index of replicas by load: finds the least loaded open replica. Of equal loads the lower
    index wins.

    The data structure is a heap of loads. A change of load adds an entry, in O(log replicas), and
    leaves the old entry in the heap, where it is dropped when it comes to the top. The heap is
    built anew when most of it is old.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """Build the index of `replicas`, at least one; `replicas[i].index` is i."""
        self.replicas = replicas
        self._loads = [_load(replica) for replica in replicas]
        """Present load of each replica; infinity if the replica is not open."""
        self._heap: list[tuple[float, int]] = []
        self._build()

    def update(self, replica: Replica) -> None:
        """Note a change of the load or state of `replica`."""
        load, index = _load(replica), replica.index
        if load == self._loads[index]:
            return
        self._loads[index] = load
        if load < inf:
            heapq.heappush(self._heap, (load, index))
            if len(self._heap) > MAX_ENTRIES * len(self._loads):
                self._build()

    def least(self) -> Replica | None:
        """Return the open replica with the lowest `load`; None if no replica is open."""
        heap, loads = self._heap, self._loads
        while heap:
            load, index = heap[0]
            if loads[index] == load:
                return self.replicas[index]
            heapq.heappop(heap)
        return None

    def _build(self) -> None:
        """Build the heap from the present loads alone."""
        self._heap = [(load, index) for index, load in enumerate(self._loads) if load < inf]
        heapq.heapify(self._heap)


def _load(replica: Replica) -> float:
    """Return the load of a replica; infinity if it is not open."""
    return replica.load if replica.open else inf


class RoutingPolicy(Protocol):
    """Interface of a policy that chooses an open replica."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        """Return an open replica, or None if no replica has room.

        Args:
            session: name that requests with a common prefix share, such as a prompt or an episode.
            loads: current loads of all replicas.
        """
        ...

    def home(self, session: str) -> int | None:
        """Return the index of the replica that has the prefix of a session; None if it is not
        known, or does not matter."""
        ...


@dataclass(frozen=True)
class LeastLoaded:
    """Policy that chooses the open replica with the lowest `load`; of equal ones, the first."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        """Return the open replica with the lowest load, whatever the session; None if none is
        open."""
        return loads.least()

    def home(self, session: str) -> int | None:
        """Return None: prefixes do not matter."""
        return None


@dataclass
class Sticky:
    """Policy that keeps a session on one replica, where its prefix is cached.

    If the replica of a session does not serve, the session moves to another replica for good. If
    the replica has no room but another one has, only this request goes to the other one, because
    waiting costs more than computing the prefix again.
    """

    max_sessions: int = 262_144
    """Number of sessions remembered; the one unused for the longest time is forgotten first. With
    fewer than there are episodes at once, many turns would go where no prefix of theirs is cached.
    They take 40 MB."""
    _home: OrderedDict[str, int] = field(default_factory=OrderedDict, repr=False)
    """Index of the replica of each session; the session used last comes last."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        """Return the replica of the session if it is open, else the least loaded open one; None if
        none is open. A new session belongs to the replica that it gets first."""
        index = self._home.get(session)
        if index is not None and loads.replicas[index].serving:
            self._home.move_to_end(session)
            home = loads.replicas[index]
            return home if home.open else loads.least()
        chosen = loads.least()
        if chosen is not None:
            self._home[session] = chosen.index
            self._home.move_to_end(session)
            if len(self._home) > self.max_sessions:
                self._home.popitem(last=False)
        return chosen

    def home(self, session: str) -> int | None:
        """Return the index of the replica of a session; None for a new one."""
        return self._home.get(session)
