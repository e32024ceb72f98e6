"""`Replica`: one inference engine as the driver sees it, and what is under way on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from roll.core.errors import EngineDiedError, EngineError, WaitTimeoutError, WorkerLostError
from roll.core.types import Completion, FinishReason, GenerateRequest, Heartbeat
from roll.rollout.written import Heard

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 1.0
"""Pause between two aborts of a request that has not ended."""


class Engine(Protocol):
    """What a replica asks of its engine; all of it may fail with `EngineDiedError` or
    `WorkerLostError` when the engine is gone."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """`request.n` completions, in sibling order; after `abort` they end with ABORT."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request; unknown ids are fine."""
        ...

    async def heartbeat(self) -> Heartbeat:
        """Comes back only from an engine that works."""
        ...


class ReplicaLostError(EngineError):
    """The replica of a request is gone; carries what is known to be written."""

    def __init__(self, message: str, written: tuple[Completion, ...]) -> None:
        super().__init__(message)
        self.written = written
        """Of each sibling."""


class State(StrEnum):
    """What a replica is good for."""

    SERVING = "serving"
    """Takes requests."""
    AWAY = "away"
    """Takes none for now: its devices are lent, or it is being asked to hand over its requests."""
    LOST = "lost"
    """Dead or stuck; a new engine is to take its place."""


@dataclass(eq=False)
class _Call:
    """One request on its way."""

    request: GenerateRequest
    outcome: asyncio.Future[list[Completion]]
    task: asyncio.Task[list[Completion]]
    heard: list[Heard] = field(default_factory=list)
    """One for each sibling, from the first heartbeat on."""
    ended: int = 0
    """Siblings whose places are free again."""


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
    loading: bool = field(default=False, init=False)
    """New weights are coming in, which may take longer than a heartbeat."""
    in_flight_tokens: int = field(default=0, init=False)
    """Prompt tokens plus the most that may still be written, over all requests it has."""
    in_flight_sequences: int = field(default=0, init=False)
    written_tokens: int = field(default=0, init=False)
    """Of its present engine, as of the last heartbeat."""
    last_heartbeat_s: float | None = field(default=None, init=False)
    """Moment on the loop's clock."""
    _calls: dict[str, _Call] = field(default_factory=dict, init=False, repr=False)
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
        return self.state is State.SERVING

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

    def reserve(self, request: GenerateRequest) -> None:
        """Count a request that is about to `run`."""
        self._count(request, 1)

    def release(self, request: GenerateRequest) -> None:
        """Take a reservation back."""
        self._count(request, -1)

    def enter(self, state: State) -> None:
        """Change what it is good for."""
        self.state = state
        self._changed(self)

    async def run(self, request: GenerateRequest, *, timeout_s: float) -> list[Completion]:
        """The request's completions. However this ends, a living engine does not work on it any
        more. Completions that end with ABORT were handed over by `hand_over`.

        Raises:
            ReplicaLostError: the engine died or was given up; carries what was heard of it.
            WaitTimeoutError: no answer within `timeout_s`; names request and replica.
            EngineError: the engine refused the request, or answered something else.
        """
        outcome: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self.engine.generate(request))
        call = self._calls[request.id] = _Call(request, outcome, task)
        task.add_done_callback(lambda _: self._settle(call))
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await outcome
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._overdue(request, timeout_s) from error
        finally:
            del self._calls[request.id]
            self._shift(request, call.ended)  # `release` takes all of it back
            if self.gone:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.done():
                await self._stop(request, task)

    async def listen(self, timeout_s: float) -> Heartbeat | None:
        """One heartbeat, taken in. Who gives none is lost, unless it was sent away or began to
        load weights meanwhile."""
        state = self.state
        try:
            async with asyncio.timeout(timeout_s) as limit:
                beat = await self.engine.heartbeat()
        except TimeoutError:
            if limit.expired() and self.state is state and not self.loading:
                self.lose(f"it gave no heartbeat for {timeout_s:g} s")
            return None
        except (EngineDiedError, WorkerLostError) as error:
            self.lose(str(error))
            return None
        self.note(beat)
        return beat

    def note(self, beat: Heartbeat) -> None:
        """Take in what the engine says of itself."""
        self.last_heartbeat_s = asyncio.get_running_loop().time()
        self.written_tokens = beat.written_tokens
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
            self._fail(call, reason)
        self._on_lost(self, reason)

    def renewed(self) -> None:
        """A new engine stands in the place of the lost one; `enter` says when it serves."""
        self.written_tokens = 0
        self.last_heartbeat_s = None
        self.state = State.AWAY

    async def hand_over(self) -> None:
        """Abort all requests; each `run` then returns what its request has so far.

        A request that does not end in time is left to its own time limit.
        """
        calls = list(self._calls.values())
        stopping = [asyncio.ensure_future(self._abort(call)) for call in calls]
        if stopping:
            await asyncio.gather(*stopping)

    async def _abort(self, call: _Call) -> None:
        stopping = asyncio.ensure_future(self._insist(call.request.id, call.task))
        await asyncio.wait([stopping], timeout=self.abort_timeout_s)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    def _settle(self, call: _Call) -> None:
        """The engine's answer, or its end, reaches whoever waits."""
        if call.task.cancelled():
            call.outcome.cancel()
            return
        error = call.task.exception()
        if isinstance(error, EngineDiedError | WorkerLostError):
            self.lose(str(error))
            self._fail(call, str(error))
        elif call.outcome.done():
            return
        elif error is not None:
            call.outcome.set_exception(error)
        elif len(found := call.task.result()) == call.request.n:
            call.outcome.set_result(found)
        else:
            call.outcome.set_exception(
                EngineError(
                    f"request {call.request.id} wanted {call.request.n} samples; the engine of "
                    f"replica {self.index} returned {len(found)}"
                )
            )

    def _fail(self, call: _Call, reason: str) -> None:
        if not call.outcome.done():
            heard = call.heard or [Heard() for _ in range(call.request.n)]
            written = tuple(sibling.so_far() for sibling in heard)
            call.outcome.set_exception(ReplicaLostError(reason, written))

    async def _stop(self, request: GenerateRequest, task: asyncio.Future[list[Completion]]) -> None:
        """Abort, and wait until the engine says that the request is over.

        A failure in here is only logged: the caller is already leaving, with an error or because
        nobody wants the result, and that is what should be heard.
        """
        stopping = asyncio.ensure_future(self._insist(request.id, task))
        try:
            await asyncio.wait([stopping], timeout=self.abort_timeout_s)
        finally:
            ended = task.done()
            stopping.cancel()
            task.cancel()
            results = await asyncio.gather(stopping, task, return_exceptions=True)
            errors = [repr(r) for r in results if isinstance(r, Exception)]
            if (errors or not ended) and not self.gone:
                logger.warning(
                    "request %s on inference replica %d: abort failed: %s",
                    request.id,
                    self.index,
                    "; ".join(errors) or f"it did not end within {self.abort_timeout_s:g} s",
                )

    async def _insist(self, request_id: str, task: asyncio.Future[list[Completion]]) -> None:
        # An abort may overtake its own request, and engines ignore ids they do not know yet.
        while not task.done() and not self.gone:
            await self.engine.abort(request_id)
            await asyncio.wait([task], timeout=ABORT_AGAIN_S)

    def _overdue(self, request: GenerateRequest, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"request {request.id} ({request.n} x up to {request.sampling.max_new_tokens} tokens) "
            f"on inference replica {self.index} did not finish within {timeout_s:g} s "
            f"({self.heard()}); raise rollout.request_timeout_s or lower sampling.max_new_tokens"
        )

    def heard(self) -> str:
        """When it was last heard of, for messages."""
        if self.last_heartbeat_s is None:
            return "no heartbeat yet"
        ago_s = asyncio.get_running_loop().time() - self.last_heartbeat_s
        return f"last heartbeat {ago_s:.1f} s ago, {self.written_tokens} tokens written by then"

    def _hear(self, call: _Call, news: Sequence[Completion]) -> None:
        """Siblings that have ended leave their places to others, before the last one ends."""
        if not call.heard:
            call.heard = [Heard() for _ in range(call.request.n)]
        ended = 0
        for sibling, piece in zip(call.heard, news, strict=True):
            sibling.add(piece)
            ended += piece.finish is not FinishReason.ABORT
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
