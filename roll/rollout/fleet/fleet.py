"""`Fleet`: all inference replicas behind one `generate` that survives the loss of any replica.

A request waits in the line of the fleet until a replica has room; a replica takes those first
whose prefix it has, and otherwise first come, first served (`waiting.py`). If the replica is lost,
or hands the request over because its devices are needed elsewhere, the tokens written so far are
kept, and each unfinished sibling continues as a separate request on another replica. If tokens of
older weights must not be continued, these siblings start again. So every sibling ends exactly once.

Waits: `generate` first waits for a seat (room on a replica). A seat becomes free when a request
ends or a replica comes back. Then `generate` waits for the replica, which ends the request, is lost
or exceeds the time limit. `update_weights` updates idle replicas first, then one part of the busy
replicas after another. A replica that was lost comes back through `join`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError, RollError
from roll.core.metrics import Metrics, Sum
from roll.core.types import GenerateRequest
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.fleet.call import ReplicaLostError
from roll.rollout.fleet.partial_completions import (
    NOTHING,
    MovedSibling,
    continuable_part,
)
from roll.rollout.fleet.replica import Replica, State
from roll.rollout.fleet.routing import LeastLoaded, Loads, RoutingPolicy
from roll.rollout.fleet.utilisation import Utilisation
from roll.rollout.fleet.waiting import Waiting, WaitingLine

logger = logging.getLogger(__name__)

WEIGHT_UPDATE_PARTS = 4
"""Number of parts in which the busy replicas get new weights, one part after another. More parts
would not reduce the pause in generation, because each replica pauses once in any case. They would
make the trainer wait longer, and more tokens would come from old weights."""
MAX_MOVES = 20
"""Largest number of moves of one request whose replicas are lost, or abort it without being asked.
With more moves the engines count as broken. A request that is handed over because devices or
weights change has not failed; this move is not counted."""


@dataclass(eq=False)
class Fleet:
    """Inference replicas of a run behind one `generate`; all calls come from one event loop."""

    replicas: Sequence[Replica]
    """Replicas of the run, at least one; `replicas[i].index` is i."""
    routing: RoutingPolicy = field(default_factory=LeastLoaded)
    continue_in_flight: bool = True
    """True: a moved sibling with tokens of older weights continues, and each token keeps the
    version that generated it. False: such a sibling starts again."""
    version: int = field(default=0, init=False)
    """Version of the weights that serving replicas have, or are getting now."""
    answer_s: float = 60.0
    """Time limit of the heartbeat with which a replica shows before a push of weights, and after a
    failed push, that it is alive; in seconds."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Function that turns tokens into text, with which more is kept of a response that stop strings
    may end; see `continuable_part`."""
    on_lost: Callable[[Replica, str], None] | None = None
    """Function called with a lost replica and the reason. The owner of this function must bring the
    replica back. Without it, `generate` fails when the last replica is lost."""
    _loads: Loads = field(init=False, repr=False)
    _waiting: WaitingLine = field(init=False, repr=False)
    _admitting: bool = field(default=False, init=False, repr=False)
    _failure: Exception | None = field(default=None, init=False, repr=False)
    _counters: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _reported: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _utilisation: Utilisation = field(default_factory=Utilisation, init=False, repr=False)

    def __post_init__(self) -> None:
        self._loads = Loads(self.replicas)
        self._waiting = WaitingLine(len(self.replicas))
        for replica in self.replicas:
            replica.report_to(self._replica_changed, self._replica_lost)

    async def generate(
        self, request: GenerateRequest, *, session: str, timeout_s: float
    ) -> list[Completion]:
        """Return `request.n` finished completions, in sibling order.

        Args:
            request: prompt, sampling parameters and number of siblings.
            session: name that requests with a common prefix share; used by the routing.
            timeout_s: longest time without progress on the replica that has the request, in
                seconds.

        Raises:
            WaitTimeoutError: a replica made no progress for `timeout_s`; the message names the
                request and the replica.
            EngineError: an engine refused the request, or the request was moved more than
                `MAX_MOVES` times.
            Exception: the error given to `fail`, if the fleet cannot serve any more.
        """
        return await self._answer(request, session, timeout_s, MAX_MOVES)

    async def _answer(
        self,
        request: GenerateRequest,
        session: str,
        timeout_s: float,
        moves: int,
        moved: MovedSibling | None = None,
    ) -> list[Completion]:
        """Run the request on one replica; finish aborted siblings on other replicas.

        Args:
            request, session, timeout_s: see `generate`.
            moves: number of further moves after a failure that are allowed.
            moved: sibling whose `rest` the request is, if it ran on another replica before; it then
                waits first in line, and the completion returned is all of it.
        """
        replica = await self._place(request, session, moved=moved is not None)
        if moved is not None and self._outdated(moved.kept):  # weights came while it waited
            moved, begun = replace(moved, kept=NOTHING), request
            request = moved.rest
            replica.reserve(request)
            replica.release(begun)
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
        if moved is not None:
            found = [moved.kept + one for one in found]
        if all(one.finish is not FinishReason.ABORT for one in found):
            return found
        if failed and not moves:
            last = f"replica {replica.index} aborted it unasked"
            raise EngineError(
                f"request {request.id} was moved {MAX_MOVES} times, and again: {last}"
            )
        self._counters["moved_requests"] += 1
        whole, first = (request, 0) if moved is None else (moved.named(request.id), moved.sibling)
        return await self._continue(whole, first, found, session, timeout_s, moves - failed)

    async def _continue(
        self,
        request: GenerateRequest,
        first: int,
        found: Sequence[Completion],
        session: str,
        timeout_s: float,
        moves: int,
    ) -> list[Completion]:
        """Finish the aborted completions in `found` on other replicas; return all completions.

        Args:
            request: request as it was asked first, with the name of the last one that ran.
            first: place of the first of `found` among its siblings.
        """
        written = [self._usable(one, request) for one in found]
        self._counters["moved_tokens"] += sum(map(len, written))

        async def finish(sibling: int, one: Completion) -> Completion:
            if one.finish is not FinishReason.ABORT:
                return one
            moved = MovedSibling(request, sibling, one)
            (whole,) = await self._answer(moved.rest, session, timeout_s, moves, moved)
            return whole

        return await all_or_first_error(
            [finish(sibling, one) for sibling, one in enumerate(written, first)]
        )

    def _usable(self, written: Completion, request: GenerateRequest) -> Completion:
        """Return the part of a completion that is kept on another replica; see
        `continue_in_flight` and `continuable_part`."""
        if written.finish is FinishReason.ABORT and self._outdated(written):
            return NOTHING
        return continuable_part(written, request.sampling, self.decode)

    def _outdated(self, written: Completion) -> bool:
        """Return whether tokens have other weights than the present ones, and must not be
        continued with these."""
        return not self.continue_in_flight and any(
            version != self.version for version, _ in written.versions.runs
        )

    async def update_weights(
        self, version: int, push: Callable[[Sequence[int]], Awaitable[None]]
    ) -> None:
        """Bring new weights to every replica that is not lost.

        Replicas without requests get the weights first, all at once. The others follow in
        `WEIGHT_UPDATE_PARTS` parts, one after another, while the other replicas go on.

        Args:
            version: version of the new weights.
            push: function that brings the weights to the replicas with the given indices. If a
                replica dies meanwhile, `push` is called again for the other replicas.

        Raises:
            Exception: the exception that `push` raised, if no replica was lost.
        """
        self.version = version
        idle = [replica.index for replica in self.replicas if not replica.requests]
        busy = [replica.index for replica in self.replicas if replica.requests]
        for indices in [
            idle,
            *(busy[wave::WEIGHT_UPDATE_PARTS] for wave in range(WEIGHT_UPDATE_PARTS)),
        ]:
            await self._update(indices, push)

    async def _update(
        self, indices: list[int], push: Callable[[Sequence[int]], Awaitable[None]]
    ) -> None:
        """Push weights to replicas; after a failure, push again without those that turn out lost,
        or raise if none is."""
        # A replica that hangs would block the others until the time limit of the push.
        await self._listen([self.replicas[i] for i in indices if self.replicas[i].serving])
        left = [self.replicas[index] for index in indices]
        while left := [replica for replica in left if not replica.gone]:
            lost = self._counters["lost_replicas"]
            try:
                async with self._loading(left):
                    await push([replica.index for replica in left])
                return
            except RollError:
                await self._listen(left)  # finds a dead replica, which also fails the others' push
                if self._counters["lost_replicas"] == lost:
                    raise

    async def _listen(self, replicas: Collection[Replica]) -> None:
        """Ask each replica for a heartbeat, which finds those that are lost."""
        await asyncio.gather(*(replica.listen(self.answer_s) for replica in replicas))

    @asynccontextmanager
    async def _loading(self, replicas: Collection[Replica]) -> AsyncIterator[None]:
        """Mark `replicas` as loading weights inside the block, so that they need no heartbeats.

        Without `continue_in_flight` their requests go back to the queue, and the replicas take new
        requests only after the block.

        If the block fails, it is unknown which replicas have complete weights. Then none of them
        takes requests until a later block succeeds.
        """
        serving = [replica.index for replica in replicas if replica.serving]
        for replica in replicas:
            replica.loading = True
        try:
            if not self.continue_in_flight:
                await self.leave(serving)
            yield
        except BaseException:  # also if the push was cancelled
            for replica in replicas:
                replica.mark_weights_incomplete()
            raise
        else:
            for replica in replicas:
                replica.mark_weights_complete()
        finally:
            for replica in replicas:
                replica.loading = False
            if not self.continue_in_flight:
                self.join(serving)

    async def leave(self, indices: Collection[int]) -> None:
        """Take replicas out of service; their requests go to other replicas or to the queue."""
        leaving = [self.replicas[i] for i in indices if self.replicas[i].state is State.SERVING]
        for replica in leaving:
            replica.enter(State.AWAY)
        await asyncio.gather(*(replica.hand_over() for replica in leaving))

    def join(self, indices: Collection[int]) -> None:
        """Put replicas that are away back into service; a replica without the trainer's weights
        takes requests only after a successful push."""
        for index in indices:
            if self.replicas[index].state is State.AWAY:
                self.replicas[index].enter(State.SERVING)

    def fail(self, error: Exception) -> None:
        """Make every request that waits for a seat, now or later, fail with `error`."""
        self._failure = error
        for waiting in self._waiting.clear():
            waiting.seat.set_exception(error)

    def take_metrics(self) -> Metrics:
        """Return counts of lost replicas, moved requests and moved tokens since the last call."""
        names = ("lost_replicas", "moved_requests", "moved_tokens")
        new = {name: self._counters[name] - self._reported[name] for name in names}
        # Not a copy of the counters: they may count at this moment, in another thread.
        self._reported.update(new)
        return Metrics({f"rollout/{name}": Sum(count) for name, count in new.items()})

    async def take_utilisation(self) -> Metrics:
        """Return which share of the time since the last call the replicas had work, as `perf/...`;
        see `Utilisation`."""
        return self._utilisation.take(self.replicas, asyncio.get_running_loop().time())

    async def _place(self, request: GenerateRequest, session: str, *, moved: bool) -> Replica:
        """Reserve a replica for the request and return it; wait for one with room. The arguments
        and errors are those of `_seat`."""
        while True:
            replica = self._free_replica(request, session, moved=moved)
            if replica is not None:
                return replica
            replica = await self._seat(request, session, moved=moved)
            if replica.serving:
                return replica
            replica.release(request)  # it went out of service before this task had its turn
            moved = True

    def _free_replica(
        self, request: GenerateRequest, session: str, *, moved: bool
    ) -> Replica | None:
        """Reserve a replica with room for the request and return it; None if the request must wait.
        Raise the error that `fail` was given, if there is one."""
        if self._failure is not None:
            raise self._failure
        replica = None if self._waiting else self.routing.choose(session, self._loads)
        if replica is not None:
            replica.reserve(request, moved=moved)
        return replica

    async def _seat(self, request: GenerateRequest, session: str, *, moved: bool) -> Replica:
        """Wait for a replica with room that is reserved for the request; a request that was moved
        waits at the head of the line. Raise the error that `fail` is given meanwhile."""
        seat: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.add(Waiting(session, request, seat, moved), self.routing.home(session))
        try:
            return await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled() and seat.exception() is None:
                seat.result().release(request)  # the seat was given just before the cancellation
            raise

    def _replica_changed(self, replica: Replica) -> None:
        """Note the changed load or state of a replica; if it is open, give its room to waiting
        requests."""
        self._loads.update(replica)
        if self._waiting and not self._admitting and replica.open:
            self._admitting = True
            try:
                self._admit_waiting(replica)
            finally:
                self._admitting = False

    def _admit_waiting(self, replica: Replica) -> None:
        """Give seats to waiting requests while this replica has room."""
        while replica.open and (one := self._waiting.next_for(replica.index)) is not None:
            chosen = self.routing.choose(one.session, self._loads)
            assert chosen is not None, "at least this replica has room"
            chosen.reserve(one.request, moved=one.moved)
            one.seat.set_result(chosen)
            self._waiting.serve(one)

    def _replica_lost(self, replica: Replica, reason: str) -> None:
        """Count a lost replica and call `on_lost`; without it, `fail` after the last replica."""
        self._counters["lost_replicas"] += 1
        if self.on_lost is not None:
            self.on_lost(replica, reason)
        elif all(one.gone for one in self.replicas):
            self.fail(EngineError(f"the last inference replica is lost: {reason}"))
