"""CPU time of the scripted engines; the rest of the process's CPU time is that of the scheduler."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any


class Meter:
    """Meter that adds up the CPU seconds spent inside `with meter:`. The blocks must not be
    nested."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.collector_s = 0.0
        """CPU seconds of Python's garbage collector outside the meter's blocks, counted inside
        `watch_collector`."""
        self._since_s = 0.0
        self._inside = False
        self._collecting_since_s = 0.0

    @contextmanager
    def watch_collector(self) -> Iterator[None]:
        gc.callbacks.append(self._collects)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, _: Mapping[str, Any]) -> None:
        if self._inside:
            return
        if phase == "start":
            self._collecting_since_s = time.process_time()
        else:
            self.collector_s += time.process_time() - self._collecting_since_s

    def __enter__(self) -> None:
        self._inside = True
        self._since_s = time.process_time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._inside = False
        self.spent_s += time.process_time() - self._since_s
