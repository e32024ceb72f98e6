"""Scripted engine: decodes many sequences at a pace that depends on their number.

All running sequences write at the same pace. So one number, called work, gives the position of all
of them: the number of tokens that a sequence running from the start would have written. A sequence
ends when the work reaches its own end. The engine plans only one event, the next end, whatever the
number of tokens.

Two things stop all sequences for a while. They are kept as a debt, which is paid before the next
token: the seconds that new weights take, and the tokens to prefill. The latter are the prompts of
new requests and, after new weights, prompts and responses of all running requests.

The value of each token is the length of its response. So a request that is continued on another
replica ends where it would have ended here.

As with real engines, the tokens of a finished response stay elsewhere, and the answer has their
address; those of a running one are in the heartbeats.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.simulation.clock import Event, virtual_loop
from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.tokens import NO_NEWS, StoredTokens
from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.errors import EngineDiedError
from roll.core.types import GenerateRequest, Heartbeat, Piece

PROMPT_TOKENS = 16
"""Length of every prompt, in tokens. Further tokens in the prompt of a request were written on
another replica before."""
SLACK_TOKENS = 1e-6
"""Tolerance for rounding, in tokens: an end that is at most this far away has been reached."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speeds and times of one replica. One scripted token stands for 16 real tokens: the defaults
    are those of a model that decodes 64 real tokens per second in each of up to 64 sequences."""

    capacity: int = 64
    """Largest number of sequences that are decoded at the same time."""
    knee: int = 64
    """Number of sequences up to which all decode at full pace. Beyond it, they share the throughput
    of the replica."""
    tokens_per_s: float = 4.0
    """Full pace of one sequence, in scripted tokens per second."""
    prefill_tokens_per_s: float = 1000.0
    """Speed of prefill of the replica, in scripted tokens per second."""
    pause_s: float = 0.5
    """Time for which new weights stop the engine, in seconds, without the prefill after it."""
    restart_s: float = 60.0
    """Time that a restart takes, in seconds."""

    @property
    def max_tokens_per_s(self) -> float:
        """Largest throughput of a replica, in scripted tokens per second."""
        return self.tokens_per_s * min(self.knee, self.capacity)

    def pace(self, batch: int) -> float:
        """Return the tokens per second of each sequence when `batch` sequences are decoded."""
        return self.tokens_per_s * min(1.0, self.knee / batch)


@dataclass(eq=False, slots=True)
class _Sequence:
    request: _Running
    sibling: int
    length: int
    """Length of the whole response, in tokens."""
    left: int
    """Number of tokens that this engine must write."""
    finish: FinishReason
    begin_work: float = -1.0
    """Work of the engine when this sequence got a slot; negative before."""
    end_work: float = -1.0
    """Work of the engine at which this sequence ends; negative before it has a slot."""
    reported: int = 0
    """Number of tokens that heartbeats have reported."""

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
    """Scripted engine of one replica. It has the methods of an engine, and `crash`, `hang`,
    `slow_by` and `restart`, which the simulation calls."""

    def __init__(self, index: int, model: EngineModel, lengths: Lengths) -> None:
        self.index = index
        self.model = model
        self.version = 0
        self.busy_slot_s = 0.0
        """Sum over time of the number of sequences in slots, in sequences times seconds; includes
        prefill and pauses."""
        self.written_tokens = 0.0
        self.prefilled_tokens = 0.0
        self._before_restart = 0.0, 0.0
        self.requests = 0
        """Number of requests that the engine has received."""
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
        """Rest of the pause for new weights, in seconds."""
        self._unread = 0.0
        """Number of tokens that are still to prefill."""
        self._next_end: Event | None = None
        self._switches: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def batch(self) -> int:
        """Number of sequences that are being decoded."""
        return self._batch

    # Methods of an engine.

    def generate(self, request: GenerateRequest) -> asyncio.Future[list[Completion]]:
        """Return the siblings when all have ended; the value of each token is the length of its
        response."""
        with self._meter:
            answer: asyncio.Future[list[Completion]] = self._loop.create_future()
            if not self.alive:
                answer.set_exception(self._death())
                return answer
            self._advance()
            self.requests += 1
            self._begin(request, answer)
            self._fill()
            self._plan()
        return answer

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` call returns what was written so far."""
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
        """Return the tokens written since the last heartbeat."""
        await self._answering()
        with self._meter:
            self._advance()
            progress = {request.id: self._news(request) for request in self._requests.values()}
        written = int(self.written_tokens - self._before_restart[0])
        prefilled = int(self.prefilled_tokens - self._before_restart[1])
        return Heartbeat(self.version, written, prefilled, progress)

    async def load_weights(self, version: int) -> None:
        """Pause, switch to the weights of `version`, and go on. The KV cache of all running
        requests is then computed again."""
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
            self._unread = float(context)  # replaces earlier prefill: that KV cache is lost too
            self._switches.append((self._work, version))
            self.version = version
        await asyncio.sleep(self.model.pause_s)

    def settle(self) -> None:
        """Bring the counters up to the present."""
        self._advance()

    # Methods that the simulation calls.

    def crash(self) -> None:
        """Die: all running requests, and all later calls until `restart`, fail with
        EngineDiedError."""
        self._advance()
        self.alive, self.hangs = False, False
        self._forget(EngineDiedError(f"scripted engine {self.index} crashed"))

    def hang(self) -> None:
        """Stop answering any call, without an error."""
        self._advance()
        self.hangs = True
        self._plan_nothing()

    def slow_by(self, factor: float) -> None:
        """Make prefill and decoding slower by `factor` from now on, also after a restart."""
        self._advance()
        self._slow = factor
        self._plan()

    async def restart(self) -> None:
        """Kill the engine if it is alive, and start a new one, without requests and with weights of
        version 0."""
        if self.alive:
            self.crash()
        await asyncio.sleep(self.model.restart_s)
        self._since_s = self._loop.time()
        self._pause_s = self._unread = 0.0
        self._switches = [(self._work, 0)]
        self._before_restart = self.written_tokens, self.prefilled_tokens
        self.version, self.alive = 0, True

    # Internal bookkeeping.

    @property
    def _prefill_tokens_per_s(self) -> float:
        return self.model.prefill_tokens_per_s / self._slow

    def _death(self) -> EngineDiedError:
        return EngineDiedError(f"scripted engine {self.index} is dead")

    async def _answering(self) -> None:
        """Raise EngineDiedError if the engine is dead; wait forever if it hangs."""
        if not self.alive:
            raise self._death()
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
        """Give free slots to the sequences that have waited longest."""
        while self._waiting and self._batch < self.model.capacity:
            sequence = self._waiting.popleft()
            if sequence.request.done[sequence.sibling] is None:
                sequence.begin_work = self._work
                sequence.end_work = self._work + sequence.left
                heapq.heappush(self._ends, sequence)
                self._batch += 1

    def _advance(self) -> None:
        """Bring the work, and all counters, up to the present."""
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
        """Plan an event for the next end of a sequence. An event that comes too early does no harm,
        because it plans the next one again."""
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
        stored = StoredTokens(sequence.length, count)
        request.done[sequence.sibling] = Completion(
            stored if done else stored.get(), self._versions(sequence, 0, count), finish
        )
        request.open -= 1
        if sequence.begin_work >= 0:
            self._batch -= 1
        if not request.open:
            del self._requests[request.id]
            if not request.answer.done():
                request.answer.set_result([one for one in request.done if one is not None])
                self._loop.hear()
            request.sequences = []  # which refer to the request: no cycle is left to search for

    def _written(self, sequence: _Sequence) -> int:
        if sequence.begin_work < 0:
            return 0
        return min(int(self._work - sequence.begin_work + SLACK_TOKENS), sequence.left)

    def _news(self, request: _Running) -> tuple[Piece, ...]:
        pieces = []
        for sequence in request.sequences:
            ended = request.done[sequence.sibling]
            count = self._written(sequence) if ended is None else len(ended)
            finish = FinishReason.ABORT if ended is None else ended.finish
            if count > sequence.reported:
                news = self._piece(sequence, sequence.reported, count, finish)
                pieces.append(Piece(sequence.reported, news))
                sequence.reported = count
            else:
                pieces.append(Piece(count, NO_NEWS[finish]))
        return tuple(pieces)

    def _piece(self, sequence: _Sequence, begin: int, end: int, finish: FinishReason) -> Completion:
        """Return the tokens from `begin` up to (not including) `end` of those that this engine
        wrote for the sequence."""
        tokens = StoredTokens(sequence.length, end - begin).get()
        return Completion(tokens, self._versions(sequence, begin, end), finish)

    def _versions(self, sequence: _Sequence, begin: int, end: int) -> VersionRuns:
        """Return the versions of the weights that wrote the tokens from `begin` to `end`."""
        versions = VersionRuns()
        upper = end
        for switched_at, version in reversed(self._switches):
            before = int(switched_at - sequence.begin_work + SLACK_TOKENS)
            lower = min(max(begin, before), upper)
            versions = VersionRuns.of_starts([(version, lower)], upper) + versions
            upper = lower
            if lower == begin:
                break
        return versions

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
