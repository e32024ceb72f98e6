"""Routing policies, which choose the replica for the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from roll.rollout.fleet.replica import Replica


class Loads:
    """Index of replicas by load: finds the least loaded open replica in constant time.

    A change of load costs O(log replicas). The data structure is a tournament tree: replica i is
    leaf `size + i`, each inner node holds the less loaded of its two children, and node 1 the least
    loaded of all. Of equal loads the lower index wins.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """Build the index of `replicas`, at least one; `replicas[i].index` is i."""
        self.replicas = replicas
        self._size = 1 << (len(replicas) - 1).bit_length()
        self._best: list[tuple[float, int]] = [(inf, 0)] * (2 * self._size)
        for replica in replicas:
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """Update the tree after a change of the load or state of `replica`."""
        node = self._size + replica.index
        value = (replica.load if replica.open else inf, replica.index)
        best = self._best
        while node and best[node] != value:
            best[node] = value
            node >>= 1
            if node:
                value = min(best[2 * node], best[2 * node + 1])

    def least(self) -> Replica | None:
        """Return the open replica with the lowest `load`; None if no replica is open."""
        load, index = self._best[1]
        return None if load == inf else self.replicas[index]


class RoutingPolicy(Protocol):
    """Interface of a policy that chooses an open replica."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        """Return an open replica, or None if no replica has room.

        Args:
            session: name that requests with a common prefix share, such as a prompt or an episode.
            loads: current loads of all replicas.
        """
        ...


@dataclass(frozen=True)
class LeastLoaded:
    """Policy that chooses the open replica with the lowest `load`; of equal ones, the first."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        return loads.least()


@dataclass
class Sticky:
    """Policy that keeps a session on one replica, where its prefix is cached.

    If the replica of a session does not serve, the session moves to another replica for good. If
    the replica has no room but another one has, only this request goes to the other one, because
    waiting costs more than computing the prefix again.
    """

    max_sessions: int = 65536
    """Number of sessions remembered; the one unused for the longest time is forgotten first."""
    _home: OrderedDict[str, int] = field(default_factory=OrderedDict, repr=False)
    """Index of the replica of each session; the session used last comes last."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
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
