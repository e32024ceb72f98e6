"""`Replica`: one inference engine as the driver sees it, and what is under way on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from roll.core.errors import (
    EngineDiedError,
    EngineError,
    IncompleteWeightsError,
    WaitTimeoutError,
    WorkerLostError,
)
from roll.core.types import Completion, GenerateRequest, Heartbeat, Piece
from roll.rollout.fleet.call import Call
from roll.rollout.fleet.engine_protocol import Engine
from roll.rollout.fleet.pace import Work
from roll.rollout.fleet.vitals import Vitals

logger = logging.getLogger(__name__)


class State(StrEnum):
    """What a replica is good for."""

    SERVING = "serving"
    """Takes requests."""
    AWAY = "away"
    """Takes none for now: its devices are lent, or it is being asked to hand over its requests."""
    LOST = "lost"
    """Dead or stuck; a new engine is to take its place."""


@dataclass(eq=False)
class Replica:
    """All calls come from one event loop."""

    index: int
    engine: Engine
    capacity: int = 256
    """Sequences it decodes at once."""
    queue: int = 0
    """Sequences sent beyond these, so that a place that falls free is filled without a trip to the
    driver."""
    abort_timeout_s: float = 30.0
    """How long an aborted request may take to end."""
    state: State = field(default=State.SERVING, init=False)
    torn: bool = field(default=False, init=False)
    """Its weights are not the trainer's, because a push broke off or its engine is new: it takes no
    requests until one has succeeded."""
    in_flight_tokens: int = field(default=0, init=False)
    """Prompt tokens plus the most that may still be written, over all requests it has."""
    in_flight_sequences: int = field(default=0, init=False)
    disturbances: int = field(default=0, init=False)
    """Weights loaded, returns from elsewhere and requests taken over, so far: after each it may
    write nothing for a while."""
    hand_overs: int = field(default=0, init=False)
    """How often it was asked to hand its requests over."""
    vitals: Vitals = field(default_factory=Vitals, init=False)
    """Of its present engine, on the loop's clock."""
    _loading: bool = field(default=False, init=False, repr=False)
    _calls: dict[str, Call] = field(default_factory=dict, init=False, repr=False)
    _changed: Callable[[Replica], None] = field(
        default_factory=lambda: lambda _: None, init=False, repr=False
    )
    _on_lost: Callable[[Replica, str], None] = field(
        default_factory=lambda: lambda _, __: None, init=False, repr=False
    )

    def report_to(
        self, changed: Callable[[Replica], None], on_lost: Callable[[Replica, str], None]
    ) -> None:
        """Call these when its load or state changes, and when it is lost and why."""
        self._changed, self._on_lost = changed, on_lost

    @property
    def load(self) -> float:
        """Outstanding tokens for each sequence that it can decode at once."""
        return self.in_flight_tokens / self.capacity

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING and not self.torn

    @property
    def loading(self) -> bool:
        """New weights are coming in, which may take longer than a heartbeat."""
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
        return self.state is State.LOST

    @property
    def open(self) -> bool:
        """Whether it takes one more request. One with many siblings may go over the brim."""
        return self.serving and self.in_flight_sequences < self.capacity + self.queue

    @property
    def requests(self) -> int:
        """Under way."""
        return len(self._calls)

    @property
    def work(self) -> Work:
        """What its present engine has done as of the last heartbeat, and in how long until now."""
        return self.vitals.work(_now_s())

    def reserve(self, request: GenerateRequest, *, moved: bool = False) -> None:
        """Count a request that is about to `run`; `moved` is one that ran elsewhere before."""
        self._count(request, 1)
        self.disturbances += moved

    def release(self, request: GenerateRequest) -> None:
        """Take a reservation back."""
        self._count(request, -1)

    def enter(self, state: State) -> None:
        """Change what it is good for."""
        if state is State.SERVING and self.state is not state:
            self.disturbances += 1
        self.state = state
        self._count_time()
        self._changed(self)

    def tear(self) -> None:
        """A push of weights broke off: whatever it still writes is of no version."""
        self.torn = True
        self._count_time()
        self._changed(self)

    def mend(self) -> None:
        """A push has succeeded."""
        if self.torn:
            self.torn = False
            self._count_time()
            self._changed(self)

    async def run(self, request: GenerateRequest, *, timeout_s: float) -> list[Completion]:
        """The request's completions. However this ends, a living engine does not work on it any
        more. Completions that end with ABORT were handed over by `hand_over`.

        Args:
            timeout_s: how long the replica may make no progress: no request of it ends, no
                heartbeat tells of a token that was written, or read into a KV cache.

        Raises:
            ReplicaLostError: the engine died or was given up, or a push of weights to it broke off;
                carries what was heard of it.
            WaitTimeoutError: no progress for `timeout_s`; names request and replica.
            EngineError: the engine refused the request, or answered something else.
        """
        outcome: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self.engine.generate(request))
        call = self._calls[request.id] = Call(request, outcome, task)
        task.add_done_callback(lambda _: self._settle(call))
        try:
            await self._wait_for(call, timeout_s)
            return outcome.result()
        finally:
            outcome.cancel()
            del self._calls[request.id]
            self._shift(request, call.ended)  # `release` takes all of it back
            if self.gone:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.done():
                await self._stop(call)

    async def _wait_for(self, call: Call, timeout_s: float) -> None:
        """Wait until there is an outcome, as long as there is progress."""
        begun_s = _now_s()
        while not call.outcome.done():
            moved_s = _now_s() if self.loading else max(begun_s, self.vitals.progress_s)
            left_s = moved_s + timeout_s - _now_s()
            if left_s <= 0:
                raise self._overdue(call.request, timeout_s)
            await asyncio.wait([call.outcome], timeout=left_s)

    async def listen(self, timeout_s: float) -> Heartbeat | None:
        """One heartbeat, taken in. Who gives none is lost, unless it was sent away or began to
        load weights meanwhile; so is who has answered with errors alone for as long."""
        state, vitals = self.state, self.vitals
        try:
            async with asyncio.timeout(timeout_s) as limit:
                beat = await self.engine.heartbeat()
        except (EngineDiedError, WorkerLostError) as error:
            if self.vitals is vitals:
                self.lose(str(error))
            return None
        except Exception as error:  # noqa: BLE001 - of an engine; counted, and told
            if not limit.expired():
                self._beat_failed(error, timeout_s)
            elif self.state is state and not self.loading:
                self.lose(f"it gave no heartbeat for {timeout_s:g} s")
            return None
        if self.vitals is vitals:
            self.note(beat)
        return beat

    def _beat_failed(self, error: Exception, timeout_s: float) -> None:
        why = f"its heartbeats fail: {type(error).__name__}: {error}"
        since_s = self.vitals.failing_since_s
        if since_s is None:
            self.vitals.failing_since_s = _now_s()
            logger.warning("inference replica %d: %s", self.index, why, exc_info=error)
        elif _now_s() - since_s >= timeout_s:
            self.lose(f"for {timeout_s:g} s {why}")

    def note(self, beat: Heartbeat) -> None:
        """Take in what the engine says of itself."""
        self.vitals.note(beat, _now_s())
        for request_id, news in beat.progress.items():
            call = self._calls.get(request_id)
            if call is not None:
                self._hear(call, news)

    def lose(self, reason: str) -> None:
        """Give the engine up: everything on it fails at once with `ReplicaLostError`."""
        if self.gone:
            return
        self.enter(State.LOST)
        for call in self._calls.values():
            call.fail(reason)
        self._on_lost(self, reason)

    def renewed(self) -> None:
        """A new engine stands in the place of the lost one, with a file's weights: `mend` says when
        it has the trainer's, `enter` when it has its devices."""
        self.vitals = Vitals()
        self.torn = True
        self.state = State.AWAY

    async def hand_over(self) -> None:
        """Abort all requests; each `run` then returns what its request has so far.

        A request that does not end in time is left to its own time limit.
        """
        self.hand_overs += 1
        calls = list(self._calls.values())
        aborts = [call.abort(self.engine, self.abort_timeout_s) for call in calls]
        await asyncio.gather(*aborts)

    def _settle(self, call: Call) -> None:
        """The engine's answer, or its end, reaches whoever waits."""
        if call.task.cancelled():
            call.outcome.cancel()
            return
        error = call.task.exception()
        if isinstance(error, EngineDiedError | WorkerLostError):
            self.lose(str(error))
            call.fail(str(error))
        elif isinstance(error, IncompleteWeightsError) and (self.loading or self.torn):
            self.tear()  # heard before the end of the push itself
            call.fail(str(error))
        elif call.outcome.done():
            return
        elif error is not None:
            call.outcome.set_exception(error)
        elif len(found := call.task.result()) == call.request.n:
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
        """Abort, and wait until the engine says that the request is over.

        A failure in here is only logged: the caller is already leaving, with an error or because
        nobody wants the result, and that is what should be heard.
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
        return WaitTimeoutError(
            f"request {request.id} ({request.n} x up to {request.sampling.max_new_tokens} tokens): "
            f"inference replica {self.index} made no progress for {timeout_s:g} s "
            f"({self.vitals.told(_now_s())}); if it may need longer for one token, or for reading "
            "a prompt, raise rollout.request_timeout_s"
        )

    def _hear(self, call: Call, news: Sequence[Piece]) -> None:
        """Siblings that have ended leave their places to others, before the last one ends."""
        ended = call.hear(news)
        if ended > call.ended:
            self._shift(call.request, call.ended - ended)
            call.ended = ended
            self._changed(self)

    def _count(self, request: GenerateRequest, sign: int) -> None:
        self.in_flight_tokens += sign * len(request.prompt_tokens)
        self._shift(request, sign * request.n)
        self._changed(self)

    def _shift(self, request: GenerateRequest, siblings: int) -> None:
        self.in_flight_tokens += siblings * request.sampling.max_new_tokens
        self.in_flight_sequences += siblings
        self._count_time()

    def _count_time(self) -> None:
        at_work = self.serving and not self.loading
        sequences = min(self.in_flight_sequences, self.capacity) if at_work else 0
        if sequences != self.vitals.sequences:
            self.vitals.occupy(sequences, _now_s())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
