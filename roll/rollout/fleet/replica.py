"""`Replica`: the driver's view of one inference engine and of the requests that run on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import inf

from roll.core.completion import Completion
from roll.core.errors import (
    EngineDiedError,
    EngineError,
    IncompleteWeightsError,
    WaitTimeoutError,
    WorkerLostError,
)
from roll.core.types import GenerateRequest, Heartbeat, Piece
from roll.rollout.fleet.call import Call
from roll.rollout.fleet.engine_protocol import Engine
from roll.rollout.fleet.pace import Work
from roll.rollout.fleet.vitals import NO_HEARTBEAT, Vitals, traced

logger = logging.getLogger(__name__)


class State(StrEnum):
    """State of a replica."""

    SERVING = "serving"
    """The replica takes requests, unless it is `weights_incomplete`."""
    AWAY = "away"
    """The replica takes no requests for now: its devices are lent, it hands over its requests, or
    its engine is new."""
    LOST = "lost"
    """The engine is dead or stuck and must be replaced."""


@dataclass(eq=False)
class Replica:
    """Driver's view of one inference engine; all calls come from one event loop."""

    index: int
    """Position of the replica in `Fleet.replicas`."""
    engine: Engine
    capacity: int = 256
    """Number of sequences that the engine decodes at once."""
    queue: int = 0
    """Number of sequences sent to the engine beyond `capacity`, so that the engine can fill a free
    place without waiting for the driver."""
    abort_timeout_s: float = 30.0
    """Time in which an aborted request must end, in seconds."""
    state: State = field(default=State.SERVING, init=False)
    weights_incomplete: bool = field(default=False, init=False)
    """True if the engine does not have the trainer's weights, because a push failed or the engine
    is new. The replica then takes no requests until a push has succeeded."""
    in_flight_tokens: int = field(default=0, init=False)
    """Prompt tokens plus the largest number of tokens that may still be written, over all requests
    of the replica."""
    in_flight_sequences: int = field(default=0, init=False)
    """Number of unfinished sequences, over all requests of the replica."""
    disturbances: int = field(default=0, init=False)
    """Number of weight loads, returns to service and moved requests taken over, so far. After each
    of them the engine may write nothing for a while."""
    hand_overs: int = field(default=0, init=False)
    """Number of calls of `hand_over`, so far."""
    vitals: Vitals = field(default_factory=Vitals, init=False)
    """Progress of the current engine; times are on the clock of the event loop."""
    _loading: bool = field(default=False, init=False, repr=False)
    _calls: dict[str, Call] = field(default_factory=dict, init=False, repr=False)
    _look: asyncio.TimerHandle | None = field(default=None, init=False, repr=False)
    """Timer of the next look for overdue requests."""
    _changed: Callable[[Replica], None] = field(
        default_factory=lambda: lambda _: None, init=False, repr=False
    )
    _on_lost: Callable[[Replica, str], None] = field(
        default_factory=lambda: lambda _, __: None, init=False, repr=False
    )

    def report_to(
        self, changed: Callable[[Replica], None], on_lost: Callable[[Replica, str], None]
    ) -> None:
        """Set the functions to call: `changed` with the replica after each change of its load or
        state, `on_lost` with the replica and the reason after each loss."""
        self._changed, self._on_lost = changed, on_lost

    @property
    def load(self) -> float:
        """Outstanding tokens divided by `capacity`."""
        return self.in_flight_tokens / self.capacity

    @property
    def serving(self) -> bool:
        """True if the replica is in service and has the trainer's weights; it may have no room."""
        return self.state is State.SERVING and not self.weights_incomplete

    @property
    def loading(self) -> bool:
        """True while new weights arrive, which may take longer than the limit of a heartbeat."""
        return self._loading

    @loading.setter
    def loading(self, loading: bool) -> None:
        if self._loading and not loading:
            self.disturbances += 1
            self.vitals.progress_s = _now_s()
        self._loading = loading
        self._count_time()

    @property
    def gone(self) -> bool:
        """True if the engine is dead or stuck, until a new one has taken its place."""
        return self.state is State.LOST

    @property
    def open(self) -> bool:
        """True if the replica takes one more request; a request with many siblings may then exceed
        `capacity + queue`."""
        return self.serving and self.in_flight_sequences < self.capacity + self.queue

    @property
    def requests(self) -> int:
        """Number of requests that run on the engine."""
        return len(self._calls)

    @property
    def work(self) -> Work:
        """Work of the current engine up to the last heartbeat, and its busy time until now."""
        return self.vitals.work(_now_s())

    def reserve(self, request: GenerateRequest, *, moved: bool = False) -> None:
        """Count a request that will `run` next; `moved` if it ran on another replica before."""
        self._count(request, 1)
        self.disturbances += moved

    def release(self, request: GenerateRequest) -> None:
        """Undo `reserve`; the request must have been reserved on this replica."""
        self._count(request, -1)

    def enter(self, state: State) -> None:
        """Change the state and call `changed` of `report_to`; `lose` is for a lost engine. Coming
        into service from another state counts as a disturbance."""
        if state is State.SERVING and self.state is not state:
            self.disturbances += 1
        self.state = state
        self._count_time()
        self._changed(self)

    def mark_weights_incomplete(self) -> None:
        """Mark the weights as incomplete after a failed push: new tokens have no valid version."""
        self.weights_incomplete = True
        self._count_time()
        self._changed(self)

    def mark_weights_complete(self) -> None:
        """Mark the weights as complete after a successful push."""
        if self.weights_incomplete:
            self.weights_incomplete = False
            self._count_time()
            self._changed(self)

    async def run(self, request: GenerateRequest, *, timeout_s: float) -> list[Completion]:
        """Run a request on the engine and return its completions.

        Completions that end with ABORT were handed over by `hand_over`, or aborted by the engine
        itself. After the call a living engine does not work on the request any more, also if the
        call ends with an error or is cancelled.

        Args:
            request: request to run.
            timeout_s: longest time without progress, in seconds. Progress means that a request of
                this replica ends, or that a heartbeat reports new tokens, written or read into a
                KV cache.

        Raises:
            ReplicaLostError: the engine died or was given up, or a push of weights to it failed;
                carries the tokens that heartbeats reported.
            WaitTimeoutError: no progress for `timeout_s`; the message names the request and the
                replica.
            EngineError: the engine refused the request, or returned a wrong number of completions.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[list[Completion]] = loop.create_future()
        answer = asyncio.ensure_future(self.engine.generate(request))
        call = Call(request, timeout_s, loop.time(), outcome, answer)
        self._calls[request.id] = call
        answer.add_done_callback(partial(self._settle, call))
        self._look_within(timeout_s)
        try:
            return await outcome
        finally:
            outcome.cancel()
            del self._calls[request.id]
            if call.ended:
                self._shift(request, call.ended)  # `release` subtracts the ended siblings, too
            if self.gone:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
            elif not answer.done():
                await self._stop(call)

    def _look_within(self, seconds: float) -> None:
        """Look for overdue requests in `seconds`, unless that is planned for an earlier time.

        One timer serves all requests of the replica: a timer for each would cost more than the rest
        of the request.
        """
        loop = asyncio.get_running_loop()
        if self._look is not None:
            if self._look.when() <= loop.time() + seconds:
                return
            self._look.cancel()
        self._look = loop.call_later(seconds, self._end_overdue)

    def _end_overdue(self) -> None:
        """End the requests during whose time limit the replica has made no progress; look again
        when the next one can be overdue."""
        self._look = None
        now_s = _now_s()
        moved_s = now_s if self.loading else self.vitals.progress_s
        next_s = inf
        for call in self._calls.values():
            left_s = call.left_s(moved_s, now_s)
            if left_s <= 0:
                call.outcome.set_exception(self._overdue(call.request, call.timeout_s))
            else:
                next_s = min(next_s, left_s)
        if next_s < inf:
            self._look_within(next_s)

    async def listen(self, timeout_s: float) -> Heartbeat | None:
        """Ask the engine for one heartbeat, take it in and return it; return None without one.

        The replica is lost if the engine is gone, or gives no heartbeat within `timeout_s` although
        it neither changed its state nor loads weights. It is also lost if all its heartbeats have
        failed with other errors for `timeout_s`.
        """
        state, vitals = self.state, self.vitals
        limit_s = vitals.limit_s(timeout_s)
        try:
            async with asyncio.timeout(limit_s) as limit:
                beat = await self.engine.heartbeat()
        except (EngineDiedError, WorkerLostError) as error:
            if self.vitals is vitals:
                self.lose(str(error))
            return None
        except Exception as error:  # noqa: BLE001 - any engine error; counted and logged
            if not limit.expired():
                self._beat_failed(error, timeout_s)
            elif self.state is state and not self.loading:
                self.lose(NO_HEARTBEAT.format(limit_s))
            return None
        if self.vitals is vitals:
            self.note(beat)
        return beat

    def _beat_failed(self, error: Exception, timeout_s: float) -> None:
        """Log the first of a series of failed heartbeats; lose the replica once the series lasts
        `timeout_s`."""
        why = f"its heartbeats fail: {type(error).__name__}: {error}"
        since_s = self.vitals.failing_since_s
        if since_s is None:
            self.vitals.failing_since_s = _now_s()
            logger.warning("inference replica %d: %s", self.index, why, exc_info=traced(error))
        elif _now_s() - since_s >= timeout_s:
            self.lose(f"for {timeout_s:g} s {why}")

    def note(self, beat: Heartbeat) -> None:
        """Take in a heartbeat: update `vitals`, and add the new pieces to their requests."""
        self.vitals.note(beat, _now_s())
        for request_id, news in beat.progress.items():
            call = self._calls.get(request_id)
            if call is not None:
                self._hear(call, news)

    def lose(self, reason: str) -> None:
        """Give the engine up; every request on it fails at once with `ReplicaLostError`."""
        if self.gone:
            return
        self.enter(State.LOST)
        for call in self._calls.values():
            call.fail(reason)
        self._on_lost(self, reason)

    def reset_for_new_engine(self) -> None:
        """Reset the replica after a new engine has replaced the lost one.

        The new engine has weights from a file. Call `mark_weights_complete` once it has those of
        the trainer, and `enter` once it may use its devices.
        """
        self.vitals = Vitals(restarts=self.vitals.restarts + 1)
        self.weights_incomplete = True
        self.state = State.AWAY

    async def hand_over(self) -> None:
        """Abort all requests; each `run` then returns the tokens that its request has so far.

        A request that does not end within `abort_timeout_s` keeps running until its own time limit.
        """
        self.hand_overs += 1
        calls = list(self._calls.values())
        aborts = [call.abort(self.engine, self.abort_timeout_s) for call in calls]
        await asyncio.gather(*aborts)

    def _settle(self, call: Call, answer: asyncio.Future[list[Completion]]) -> None:
        """Pass the answer of the engine, or its error, to the outcome of `call`."""
        if answer.cancelled():
            call.outcome.cancel()
            return
        error = answer.exception()
        if isinstance(error, EngineDiedError | WorkerLostError):
            self.lose(str(error))
            call.fail(str(error))
        elif isinstance(error, IncompleteWeightsError) and (
            self.loading or self.weights_incomplete
        ):
            # The request fails before the push itself reports its end.
            self.mark_weights_incomplete()
            call.fail(str(error))
        elif call.outcome.done():
            return
        elif error is not None:
            call.outcome.set_exception(error)
        elif len(found := answer.result()) == call.request.n:
            self.vitals.progress_s = _now_s()
            call.outcome.set_result(found)
        else:
            call.outcome.set_exception(
                EngineError(
                    f"request {call.request.id} wanted {call.request.n} samples; the engine of "
                    f"replica {self.index} returned {len(found)}"
                )
            )

    async def _stop(self, call: Call) -> None:
        """Abort the request and wait, at most `abort_timeout_s`, until the engine has ended it.

        If that fails, this is only logged (not at all for a lost engine), because the caller
        already ends with an error or a cancellation, which must not be replaced.
        """
        failure = await call.stop(self.engine, self.abort_timeout_s)
        if failure and not self.gone:
            logger.warning(
                "request %s on inference replica %d: abort failed: %s",
                call.request.id,
                self.index,
                failure,
            )

    def _overdue(self, request: GenerateRequest, timeout_s: float) -> WaitTimeoutError:
        """Return the error for a request on which the replica has made no progress for
        `timeout_s`."""
        return WaitTimeoutError(
            f"request {request.id} ({request.n} x up to {request.sampling.max_new_tokens} tokens): "
            f"inference replica {self.index} made no progress for {timeout_s:g} s "
            f"({self.vitals.told(_now_s())}); if it may need longer for one token, or for reading "
            "a prompt, raise rollout.request_timeout_s"
        )

    def _hear(self, call: Call, news: Sequence[Piece]) -> None:
        """Add pieces to `call`; free the places of ended siblings before the last sibling ends."""
        ended = call.hear(news)
        if ended > call.ended:
            self._shift(call.request, call.ended - ended)
            call.ended = ended
            self._changed(self)

    def _count(self, request: GenerateRequest, sign: int) -> None:
        """Add a request to the load (`sign` 1) or subtract it (-1), and report the change."""
        siblings = sign * request.n
        self.in_flight_tokens += (
            sign * len(request.prompt_tokens) + siblings * request.sampling.max_new_tokens
        )
        self.in_flight_sequences += siblings
        self._count_time()
        self._changed(self)

    def _shift(self, request: GenerateRequest, siblings: int) -> None:
        """Add a number of siblings of a request to the load; subtract them if it is negative."""
        self.in_flight_tokens += siblings * request.sampling.max_new_tokens
        self.in_flight_sequences += siblings
        self._count_time()

    def _count_time(self) -> None:
        """Tell `vitals` on how many sequences the engine works from now on."""
        sequences = self.in_flight_sequences
        if sequences > self.capacity:
            sequences = self.capacity
        if self._loading or not self.serving:
            sequences = 0
        if sequences != self.vitals.sequences:
            self.vitals.occupy(sequences, _now_s())


def _now_s() -> float:
    """Return the time on the clock of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
