"""Which replica gets the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from roll.rollout.fleet.replica import Replica


class Loads:
    """The least loaded open replica in constant time, and a change of load in O(log replicas).

    A tournament: replica i sits on leaf `size + i`, each inner node holds the better of its two
    children, node 1 the best of all. Ties go to the lower index.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """
        Args:
            replicas: at least one, each at the position that its `index` names.
        """
        self.replicas = replicas
        self._size = 1 << (len(replicas) - 1).bit_length()
        self._best: list[tuple[float, int]] = [(inf, 0)] * (2 * self._size)
        for replica in replicas:
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """Take in a replica's present load and state."""
        node = self._size + replica.index
        value = (replica.load if replica.open else inf, replica.index)
        best = self._best
        while node and best[node] != value:
            best[node] = value
            node >>= 1
            if node:
                value = min(best[2 * node], best[2 * node + 1])

    def least(self) -> Replica | None:
        """The replica with the fewest outstanding tokens for its capacity; None if all are full."""
        load, index = self._best[1]
        return None if load == inf else self.replicas[index]


class RoutingPolicy(Protocol):
    """Chooses a replica that is open."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        """None where no replica has room. `session` names what shares a prefix: a prompt, an
        episode."""
        ...


@dataclass(frozen=True)
class LeastLoaded:
    """The replica with the fewest outstanding tokens for its capacity; the first of equals."""

    def choose(self, session: str, loads: Loads) -> Replica | None:
        return loads.least()


@dataclass
class Sticky:
    """Keeps a session on one replica, where its prefix is cached.

    A session moves for good when its replica is gone, and for one request when that has no room
    and another has: waiting in a queue costs more than computing the prefix again.
    """

    max_sessions: int = 65536
    """Sessions remembered; the longest unused is forgotten first."""
    _home: OrderedDict[str, int] = field(default_factory=OrderedDict, repr=False)

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
