"""A scripted engine: decodes many sequences at a pace that depends on how many there are.

All running sequences write at the same pace, so one number, the tokens that a sequence running from
the start would have written, says where each of them stands. A sequence ends when that number
reaches its own end: the engine plans one event, the next end, whatever the number of tokens.
What stops all sequences for a while is a debt, paid before the next token: seconds for new weights,
and tokens to prefill, which are the prompts of requests and, after new weights, all that runs.
Each token's value is the length of its response, so a request that is continued on another replica
ends where it would have ended here.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.simulation.clock import Event, virtual_loop
from benchmarks.simulation.lengths import Lengths
from roll.core.errors import EngineDiedError
from roll.core.types import Completion, FinishReason, GenerateRequest, Heartbeat, Piece

PROMPT_TOKENS = 16
"""Of every prompt. What a request's prompt has beyond that was written before, elsewhere."""
SLACK_TOKENS = 1e-6
"""An end this close has come: the clock is rounded."""

NO_NEWS = {finish: Completion((), (), (), finish) for finish in FinishReason}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speeds and times of one replica. A token stands for 16 real ones: the default is a model
    that decodes 64 tokens a second in each of up to 64 sequences."""

    capacity: int = 64
    """Sequences decoded at once."""
    knee: int = 64
    """Up to here a sequence's pace does not depend on the others; beyond, they share."""
    tokens_per_s: float = 4.0
    """Of one sequence, up to the knee."""
    prefill_tokens_per_s: float = 1000.0
    pause_s: float = 0.5
    """New weights stop the engine for this long, before it computes the KV cache again."""
    restart_s: float = 60.0

    @property
    def max_tokens_per_s(self) -> float:
        """Of a replica whose batch is at the knee or beyond."""
        return self.tokens_per_s * min(self.knee, self.capacity)

    def pace(self, batch: int) -> float:
        """Tokens per second of each of `batch` sequences."""
        return self.tokens_per_s * min(1.0, self.knee / batch)


@dataclass(eq=False, slots=True)
class _Sequence:
    request: _Running
    sibling: int
    length: int
    """Tokens of the whole response."""
    left: int
    """Tokens that this engine is to write."""
    finish: FinishReason
    begin_work: float = -1.0
    """Where the engine's work stood when it got a slot; negative before."""
    end_work: float = -1.0
    reported: int = 0
    """Tokens that a heartbeat has told of."""

    def __lt__(self, other: _Sequence) -> bool:
        return self.end_work < other.end_work


@dataclass(eq=False, slots=True)
class _Running:
    id: str
    answer: asyncio.Future[list[Completion]]
    context: int
    sequences: list[_Sequence] = field(default_factory=list)
    done: list[Completion | None] = field(default_factory=list)
    open: int = 0


class ScriptedEngine:
    """One replica. Methods are those of an engine; `crash`, `hang` and `slow_by` are fate's."""

    def __init__(self, index: int, model: EngineModel, lengths: Lengths) -> None:
        self.index = index
        self.model = model
        self.version = 0
        self.busy_slot_s = 0.0
        """Sequences times seconds, prefill and pauses included."""
        self.written_tokens = 0.0
        self.prefilled_tokens = 0.0
        self._before_restart = 0.0, 0.0
        self.requests = 0
        """That it was ever asked for."""
        self.alive = True
        self.hangs = False
        self._slow = 1.0
        self._lengths = lengths
        self._loop = virtual_loop()
        self._meter = self._loop.meter
        self._requests: dict[str, _Running] = {}
        self._waiting: deque[_Sequence] = deque()
        self._ends: list[_Sequence] = []
        self._batch = 0
        self._work = 0.0
        self._since_s = self._loop.time()
        self._pause_s = 0.0
        """Left of the time that new weights take."""
        self._unread = 0.0
        """Tokens to prefill."""
        self._next_end: Event | None = None
        self._switches: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def batch(self) -> int:
        """Sequences that are being decoded."""
        return self._batch

    # What an engine does.

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Siblings whose tokens all say how long the response is."""
        self._require_alive()
        with self._meter:
            answer: asyncio.Future[list[Completion]] = self._loop.create_future()
            self._advance()
            self.requests += 1
            self._begin(request, answer)
            self._fill()
            self._plan()
        return await answer

    async def abort(self, request_id: str) -> None:
        """End a request; what it has written comes back."""
        await self._answering()
        with self._meter:
            request = self._requests.get(request_id)
            if request is None:
                return
            self._advance()
            for sequence in request.sequences:
                if request.done[sequence.sibling] is None:
                    self._end(sequence, FinishReason.ABORT)
            self._fill()
            self._plan()

    async def heartbeat(self) -> Heartbeat:
        """Everything written since the last one."""
        await self._answering()
        with self._meter:
            self._advance()
            progress = {request.id: self._news(request) for request in self._requests.values()}
        written = int(self.written_tokens - self._before_restart[0])
        prefilled = int(self.prefilled_tokens - self._before_restart[1])
        return Heartbeat(self.version, written, prefilled, progress)

    async def load_weights(self, version: int) -> None:
        """Stop, switch and go on; the KV cache of what runs is then computed again."""
        await self._answering()
        with self._meter:
            self._advance()
            context = sum(
                request.context + self._written(sequence)
                for request in self._requests.values()
                for sequence in request.sequences
                if request.done[sequence.sibling] is None
            )
            self._pause_s += self.model.pause_s
            self._unread = float(context)  # what was read of prompts so far is dropped too
            self._switches.append((self._work, version))
            self.version = version
        await asyncio.sleep(self.model.pause_s)

    def settle(self) -> None:
        """Bring the books up to now."""
        self._advance()

    # What happens to it.

    def crash(self) -> None:
        """Die: all requests fail at once, later ones too, until `restart`."""
        self._advance()
        self.alive, self.hangs = False, False
        self._forget(EngineDiedError(f"scripted engine {self.index} crashed"))

    def hang(self) -> None:
        """Stop answering anything, without an error."""
        self._advance()
        self.hangs = True
        self._plan_nothing()

    def slow_by(self, factor: float) -> None:
        """Prefill and decode this many times slower from now on, new engines in its place too."""
        self._advance()
        self._slow = factor
        self._plan()

    async def restart(self) -> None:
        """Kill what is left and start anew, without requests and with the first weights."""
        if self.alive:
            self.crash()
        await asyncio.sleep(self.model.restart_s)
        self._since_s = self._loop.time()
        self._pause_s = self._unread = 0.0
        self._switches = [(self._work, 0)]
        self._before_restart = self.written_tokens, self.prefilled_tokens
        self.version, self.alive = 0, True

    # How it keeps its books.

    @property
    def _prefill_tokens_per_s(self) -> float:
        return self.model.prefill_tokens_per_s / self._slow

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDiedError(f"scripted engine {self.index} is dead")

    async def _answering(self) -> None:
        """Raise where it is dead; wait for ever where it hangs."""
        self._require_alive()
        if self.hangs:
            await self._loop.create_future()

    def _begin(self, request: GenerateRequest, answer: asyncio.Future[list[Completion]]) -> None:
        before = len(request.prompt_tokens) - PROMPT_TOKENS
        limit = before + request.sampling.max_new_tokens
        running = _Running(request.id, answer, PROMPT_TOKENS + before)
        self._requests[request.id] = running
        running.open, running.done = request.n, [None] * request.n
        self._unread += len(request.prompt_tokens)
        for sibling in range(request.n):
            if before:
                length = request.prompt_tokens[-1]
            else:
                assert request.seed is not None, "a scripted length is drawn from the seed"
                length = min(max(1, round(self._lengths.draw(request.seed + sibling))), limit)
            finish = FinishReason.LENGTH if length >= limit else FinishReason.STOP
            sequence = _Sequence(running, sibling, length, length - before, finish)
            running.sequences.append(sequence)
            self._waiting.append(sequence)

    def _fill(self) -> None:
        """Give free slots to who has waited longest."""
        while self._waiting and self._batch < self.model.capacity:
            sequence = self._waiting.popleft()
            if sequence.request.done[sequence.sibling] is None:
                sequence.begin_work = self._work
                sequence.end_work = self._work + sequence.left
                heapq.heappush(self._ends, sequence)
                self._batch += 1

    def _advance(self) -> None:
        """Bring the work up to now."""
        now_s = self._loop.time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self.hangs or not self.alive:
            return
        self.busy_slot_s += self._batch * passed_s
        paused_s = min(self._pause_s, passed_s)
        self._pause_s -= paused_s
        read = min(self._unread, (passed_s - paused_s) * self._prefill_tokens_per_s)
        self._unread -= read
        self.prefilled_tokens += read
        left_s = passed_s - paused_s - read / self._prefill_tokens_per_s
        if self._batch and left_s > 0:
            work = left_s * self.model.pace(self._batch) / self._slow
            self._work += work
            self.written_tokens += self._batch * work

    def _plan(self) -> None:
        """Plan the next end. One that comes too early does no harm, it looks again."""
        while self._ends and self._is_over(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends or self.hangs:
            self._plan_nothing()
            return
        left = max(0.0, self._ends[0].end_work - self._work)
        debt_s = self._pause_s + self._unread / self._prefill_tokens_per_s
        due_s = self._since_s + debt_s + left / self.model.pace(self._batch) * self._slow
        if self._next_end is None or self._next_end.when_s > due_s:
            self._plan_nothing()
            self._next_end = self._loop.happen(due_s, self._end_due)

    def _end_due(self) -> None:
        self._next_end = None
        self._advance()
        while self._ends and self._ends[0].end_work <= self._work + SLACK_TOKENS:
            sequence = heapq.heappop(self._ends)
            if not self._is_over(sequence):
                self._end(sequence, sequence.finish)
        self._fill()
        self._plan()

    def _end(self, sequence: _Sequence, finish: FinishReason) -> None:
        request = sequence.request
        done = finish is not FinishReason.ABORT
        count = sequence.left if done else self._written(sequence)
        request.done[sequence.sibling] = self._piece(sequence, 0, count, finish)
        request.open -= 1
        if sequence.begin_work >= 0:
            self._batch -= 1
        if not request.open:
            del self._requests[request.id]
            if not request.answer.done():
                request.answer.set_result([one for one in request.done if one is not None])
                self._loop.hear()

    def _written(self, sequence: _Sequence) -> int:
        if sequence.begin_work < 0:
            return 0
        return min(int(self._work - sequence.begin_work + SLACK_TOKENS), sequence.left)

    def _news(self, request: _Running) -> tuple[Piece, ...]:
        pieces = []
        for sequence in request.sequences:
            ended = request.done[sequence.sibling]
            count = self._written(sequence) if ended is None else len(ended.tokens)
            finish = FinishReason.ABORT if ended is None else ended.finish
            if count > sequence.reported:
                news = self._piece(sequence, sequence.reported, count, finish)
                pieces.append(Piece(sequence.reported, news))
                sequence.reported = count
            else:
                pieces.append(Piece(count, NO_NEWS[finish]))
        return tuple(pieces)

    def _piece(self, sequence: _Sequence, begin: int, end: int, finish: FinishReason) -> Completion:
        """Tokens `begin` to `end` of what this engine wrote."""
        versions: tuple[int, ...] = ()
        upper = end
        for switched_at, version in reversed(self._switches):
            before = int(switched_at - sequence.begin_work + SLACK_TOKENS)
            lower = min(max(begin, before), upper)
            versions = (version,) * (upper - lower) + versions
            upper = lower
            if lower == begin:
                break
        count = end - begin
        return Completion((sequence.length,) * count, (-1.0,) * count, versions, finish)

    def _is_over(self, sequence: _Sequence) -> bool:
        return sequence.request.done[sequence.sibling] is not None

    def _forget(self, error: EngineDiedError) -> None:
        self._plan_nothing()
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_exception(error)
                self._loop.hear()
        self._requests, self._ends, self._batch = {}, [], 0
        self._waiting.clear()

    def _plan_nothing(self) -> None:
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None
