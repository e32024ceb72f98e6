"""Wall-clock times of named phases, kept as metrics `time/<phase>_s`; when single pieces of work
began and ended; and the time of overlapping work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from roll.core.metrics import Metrics, Sum


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work with a name, such as a call of a worker's method."""

    name: str
    begin_s: float
    end_s: float
    """Begin and end, in seconds since 1970, by the clock of the machine that did the work."""


class SpanRecorder:
    """Notes begin and end of pieces of work, while it is switched on. Any thread may call any
    method."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None

    def begin(self) -> None:
        """Switch on, and forget all spans."""
        self._spans = []

    def end(self) -> list[Span]:
        """Switch off; return the spans that ended since `begin`."""
        spans, self._spans = self._spans or [], None
        return spans

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note the work inside the block, also if the block raises an error."""
        begun_s = time.time()
        try:
            yield
        finally:
            spans = self._spans
            if spans is not None:
                spans.append(Span(name, begun_s, time.time()))


class Timers:
    """Stopwatches of named phases. If a phase is entered several times, its durations add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.spans = SpanRecorder()
        """Recorder of begin and end of the phases."""
        self.phase = ""
        """Innermost phase that is under way; empty if none is."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside the block to the phase, also if the block raises an error."""
        start = time.perf_counter()
        around, self.phase = self.phase, phase
        try:
            with self.spans.noted(phase):
                yield
        finally:
            self.phase = around
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere to the phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def seconds(self, phase: str) -> float:
        """Return the time spent in the phase since the last `take`, in seconds."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> Metrics:
        """Return the durations since the last call as metrics `time/<phase>_s`, and reset them."""
        taken = Metrics({f"time/{name}_s": Sum(s) for name, s in self._seconds.items()})
        self._seconds = {}
        return taken


class BusyTime:
    """Stopwatch of the time in which at least one of several overlapping blocks is under way.

    Any thread may call any method.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count; `clock` returns seconds and never goes back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = self._counted_to_s = clock()
        self._busy_s = 0.0
        self._blocks = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside the block."""
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def restart(self) -> None:
        """Begin to count anew; blocks that are under way go on."""
        with self._lock:
            self._since_s = self._counted_to_s = self._clock()
            self._busy_s = 0.0

    def share(self) -> float:
        """Return the share of the time since the start in which a block was under way."""
        with self._lock:
            now_s = self._count()
            return self._busy_s / max(now_s - self._since_s, 1e-9)

    def _enter(self, blocks: int) -> None:
        """Count the time up to now, then change the number of blocks under way by `blocks`, 1 or
        -1."""
        with self._lock:
            self._count()
            self._blocks += blocks

    def _count(self) -> float:
        """Count the time up to now; return the time."""
        now_s = self._clock()
        if self._blocks:
            self._busy_s += now_s - self._counted_to_s
        self._counted_to_s = now_s
        return now_s
