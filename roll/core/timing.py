"""Wall-clock times of named phases, kept as metrics `time/<phase>_s`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from roll.core.metrics import Metrics, Sum


class Timers:
    """Stopwatches of named phases. If a phase is entered several times, its durations add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside the block to the phase, also if the block raises an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
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
