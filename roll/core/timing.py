"""Wall-clock times of named phases, kept as metrics `time/<phase>_s`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from roll.core.metrics import Metrics, Sum


class Timers:
    """Collects durations; a phase entered several times adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def seconds(self, phase: str) -> float:
        """The phase's duration so far."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> Metrics:
        """The durations since the last call, as `time/<phase>_s`; starts anew."""
        taken = Metrics({f"time/{name}_s": Sum(s) for name, s in self._seconds.items()})
        self._seconds = {}
        return taken
