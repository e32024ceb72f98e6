"""`Fleet`: all inference replicas behind one `generate` that outlives the loss of any of them.

A request waits here, first come first served, until a replica has room. When its replica is lost,
or hands it over because its devices are wanted elsewhere, what is written so far is kept and each
unfinished sibling goes on as a request of its own on another replica; where that is not allowed,
the request starts again. Every sibling therefore ends exactly once.

Who waits for whom: `generate` waits for a seat, which a request that ends, or a replica that comes
back, gives free; then for its replica, whose end, loss or time limit it hears. `update_weights`
waits for one replica after the other. A replica that is lost comes back through `join`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from roll.core.errors import EngineError, RollError
from roll.core.metrics import Metrics, Sum
from roll.core.types import Completion, FinishReason, GenerateRequest
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.fleet.call import ReplicaLostError
from roll.rollout.fleet.partial_completions import NOTHING, joined, kept, remaining_request
from roll.rollout.fleet.replica import Replica, State
from roll.rollout.fleet.routing import LeastLoaded, Loads, RoutingPolicy

logger = logging.getLogger(__name__)

WAVES = 4
"""In which new weights come to a fleet that generates. More would not stop fewer tokens: each
replica pauses once. They would let the trainer wait longer, and stale weights write more."""
MAX_MOVES = 20
"""Of one request whose replicas are lost, or abort it unasked; beyond, the engines are not worth
going on with. To be handed over, because devices or weights change, is no failure and not counted.
"""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request without a replica."""

    session: str
    request: GenerateRequest
    seat: asyncio.Future[Replica]
    moved: bool
    """It ran elsewhere before."""


@dataclass(eq=False)
class Fleet:
    """All replicas of a run. All calls come from one event loop."""

    replicas: Sequence[Replica]
    """At least one, each at the position that its `index` names."""
    routing: RoutingPolicy = field(default_factory=LeastLoaded)
    continue_in_flight: bool = True
    """What becomes of a request whose tokens are of older weights than its next replica's: it goes
    on, each token with its own version, or it starts again."""
    version: int = field(default=0, init=False)
    """Of the weights that serving replicas have, or are just getting."""
    answer_s: float = 60.0
    """How long a replica may take to show that it lives, before a push and after one that broke."""
    on_lost: Callable[[Replica, str], None] | None = None
    """Called when a replica is lost, with the reason; who sets it sees to its return."""
    _loads: Loads = field(init=False, repr=False)
    _waiting: deque[_Waiting] = field(default_factory=deque, init=False, repr=False)
    _admitting: bool = field(default=False, init=False, repr=False)
    _failure: Exception | None = field(default=None, init=False, repr=False)
    _counters: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _reported: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        self._loads = Loads(self.replicas)
        for replica in self.replicas:
            replica.report_to(self._replica_changed, self._replica_lost)

    async def generate(
        self, request: GenerateRequest, *, session: str, timeout_s: float
    ) -> list[Completion]:
        """`request.n` finished completions, in sibling order.

        Args:
            session: names what shares a prefix, for the routing.
            timeout_s: how long a replica may make no progress while it has the request.

        Raises:
            WaitTimeoutError: a replica made no progress for so long; names request and replica.
            EngineError: an engine refused the request, or it was moved too often.
            Exception: what `fail` was told, when the fleet is beyond help.
        """
        return await self._answer(request, session, timeout_s, MAX_MOVES, moved=False)

    async def _answer(
        self, request: GenerateRequest, session: str, timeout_s: float, moves: int, moved: bool
    ) -> list[Completion]:
        """`moves`: how often it may still move without having been handed over."""
        replica = await self._acquire_replica(request, session, first=moved)
        asked = replica.hand_overs
        try:
            found = await replica.run(request, timeout_s=timeout_s)
        except ReplicaLostError as lost:
            if not moves:
                raise EngineError(
                    f"request {request.id} lost its replica {MAX_MOVES + 1} times, the last one "
                    f"to: {lost}"
                ) from lost
            found, failed = list(lost.written), True
        else:
            failed = replica.hand_overs == asked
        finally:
            replica.release(request)
        if all(one.finish is not FinishReason.ABORT for one in found):
            return found
        if failed and not moves:
            last = f"replica {replica.index} aborted it unasked"
            raise EngineError(
                f"request {request.id} was moved {MAX_MOVES} times, and again: {last}"
            )
        self._counters["moved_requests"] += 1
        return await self._continue(request, found, session, timeout_s, moves - failed)

    async def _continue(
        self,
        request: GenerateRequest,
        found: Sequence[Completion],
        session: str,
        timeout_s: float,
        moves: int,
    ) -> list[Completion]:
        """The completions, of which `found` is there, with the help of other replicas."""
        written = [self._usable(one, request) for one in found]
        self._counters["moved_tokens"] += sum(len(one.tokens) for one in written)

        async def finish(sibling: int, one: Completion) -> Completion:
            if one.finish is not FinishReason.ABORT:
                return one
            rest = remaining_request(request, sibling, one)
            (more,) = await self._answer(rest, session, timeout_s, moves, moved=True)
            return joined(one, more)

        return await all_or_first_error(
            [finish(sibling, one) for sibling, one in enumerate(written)]
        )

    def _usable(self, written: Completion, request: GenerateRequest) -> Completion:
        ended = written.finish is not FinishReason.ABORT
        same = all(version == self.version for version in written.versions)
        if ended or same or self.continue_in_flight:
            return kept(written, request.sampling)
        return NOTHING

    async def update_weights(
        self, version: int, push: Callable[[Sequence[int]], Awaitable[None]]
    ) -> None:
        """New weights to every replica that is not lost: to all at once where nothing runs, else
        to a part of them after the other, while the others go on.

        Args:
            push: brings the weights to the replicas of these indices. One that dies meanwhile is
                reported lost, and `push` is asked again for the others.

        Raises:
            Exception: what `push` raised although no replica was lost.
        """
        self.version = version
        idle = [replica.index for replica in self.replicas if not replica.requests]
        busy = [replica.index for replica in self.replicas if replica.requests]
        for indices in [idle, *(busy[wave::WAVES] for wave in range(WAVES))]:
            await self._update(indices, push)

    async def _update(
        self, indices: list[int], push: Callable[[Sequence[int]], Awaitable[None]]
    ) -> None:
        # One that hangs would hold up the others until the push's own time limit.
        await self._listen([self.replicas[i] for i in indices if self.replicas[i].serving])
        left = [self.replicas[index] for index in indices]
        while left := [replica for replica in left if not replica.gone]:
            lost = self._counters["lost_replicas"]
            try:
                async with self._loading(left):
                    await push([replica.index for replica in left])
                return
            except RollError:
                await self._listen(left)  # whoever died took the push of the others with it
                if self._counters["lost_replicas"] == lost:
                    raise

    async def _listen(self, replicas: Collection[Replica]) -> None:
        await asyncio.gather(*(replica.listen(self.answer_s) for replica in replicas))

    @asynccontextmanager
    async def _loading(self, replicas: Collection[Replica]) -> AsyncIterator[None]:
        """Expect no heartbeats inside the block; and where requests do not outlive their weights,
        give them back to the queue, and take new ones only on the new weights.

        Where the block fails, nobody knows which of the replicas have whole weights: they take no
        requests until such a block has succeeded.
        """
        serving = [replica.index for replica in replicas if replica.serving]
        for replica in replicas:
            replica.loading = True
        try:
            if not self.continue_in_flight:
                await self.leave(serving)
            yield
        except Exception:
            for replica in replicas:
                replica.tear()
            raise
        else:
            for replica in replicas:
                replica.mend()
        finally:
            for replica in replicas:
                replica.loading = False
            if not self.continue_in_flight:
                self.join(serving)

    async def leave(self, indices: Collection[int]) -> None:
        """Take replicas out, their requests handed over to the others or back to the queue."""
        leaving = [self.replicas[i] for i in indices if self.replicas[i].state is State.SERVING]
        for replica in leaving:
            replica.enter(State.AWAY)
        await asyncio.gather(*(replica.hand_over() for replica in leaving))

    def join(self, indices: Collection[int]) -> None:
        """These replicas serve again; those whose weights are not the trainer's do so once a push
        has succeeded."""
        for index in indices:
            if self.replicas[index].state is State.AWAY:
                self.replicas[index].enter(State.SERVING)

    def fail(self, error: Exception) -> None:
        """Every request that waits for a seat, now or later, ends with this error."""
        self._failure = error
        while self._waiting:
            seat = self._waiting.popleft().seat
            if not seat.done():
                seat.set_exception(error)

    def take_metrics(self) -> Metrics:
        """Since the last call: replicas lost, requests moved, tokens that moved with them."""
        names = ("lost_replicas", "moved_requests", "moved_tokens")
        new = {name: self._counters[name] - self._reported[name] for name in names}
        self._reported = self._counters.copy()
        return Metrics({f"rollout/{name}": Sum(count) for name, count in new.items()})

    async def _acquire_replica(
        self, request: GenerateRequest, session: str, *, first: bool
    ) -> Replica:
        """A replica with room, reserved for the request; one that was moved waits `first`."""
        if self._failure is not None:
            raise self._failure
        if not self._waiting:
            replica = self.routing.choose(session, self._loads)
            if replica is not None:
                replica.reserve(request, moved=first)
                return replica
        seat: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(session, request, seat, moved=first)
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)
        try:
            return await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled() and seat.exception() is None:
                seat.result().release(request)  # given in the same moment
            raise

    def _replica_changed(self, replica: Replica) -> None:
        self._loads.update(replica)
        if self._waiting and replica.open and not self._admitting:
            self._admitting = True
            try:
                self._admit_waiting()
            finally:
                self._admitting = False

    def _admit_waiting(self) -> None:
        """Give seats to those who wait, as long as there are any."""
        while self._waiting:
            first = self._waiting[0]
            if not first.seat.done():
                replica = self.routing.choose(first.session, self._loads)
                if replica is None:
                    return
                replica.reserve(first.request, moved=first.moved)
                first.seat.set_result(replica)
            self._waiting.popleft()

    def _replica_lost(self, replica: Replica, reason: str) -> None:
        self._counters["lost_replicas"] += 1
        if self.on_lost is not None:
            self.on_lost(replica, reason)
        elif all(one.gone for one in self.replicas):
            self.fail(EngineError(f"the last inference replica is lost: {reason}"))
