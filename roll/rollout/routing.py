"""Which replica gets the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll.core.types import Completion, GenerateRequest
from roll.rollout.engines import Replica


class RoutingPolicy(Protocol):
    """Chooses among at least one replica."""

    def choose(self, session: str, replicas: Sequence[Replica]) -> Replica:
        """`session` names what shares a prefix: a prompt, an episode."""
        ...


@dataclass(frozen=True)
class LeastLoaded:
    """The replica with the fewest outstanding tokens for its capacity; the first of equals."""

    def choose(self, session: str, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda r: (r.in_flight_tokens / r.capacity, r.index))


@dataclass
class Sticky:
    """Keeps a session on one replica, where its prefix is cached.

    A session moves for good when its replica is gone, and for one request when that has no room
    and another has: waiting in a queue costs more than computing the prefix again.
    """

    fallback: RoutingPolicy = field(default_factory=LeastLoaded)
    max_sessions: int = 65536
    """Sessions remembered; the longest unused is forgotten first."""
    _home: OrderedDict[str, int] = field(default_factory=OrderedDict, repr=False)

    def choose(self, session: str, replicas: Sequence[Replica]) -> Replica:
        home = next((r for r in replicas if r.index == self._home.get(session)), None)
        if home is None:
            home = self.fallback.choose(session, replicas)
            self._home[session] = home.index
            if len(self._home) > self.max_sessions:
                self._home.popitem(last=False)
        self._home.move_to_end(session)
        if home.has_room:
            return home
        roomy = [replica for replica in replicas if replica.has_room]
        return self.fallback.choose(session, roomy) if roomy else home


@dataclass(frozen=True)
class Engines:
    """All replicas of a run behind one routing policy."""

    replicas: Sequence[Replica]
    """At least one."""
    routing: RoutingPolicy

    async def generate(
        self, request: GenerateRequest, *, session: str, timeout_s: float
    ) -> list[Completion]:
        """`Replica.run` on the replica that the routing chooses."""
        replica = self.routing.choose(session, self.replicas)
        return await replica.run(request, timeout_s=timeout_s)
