"""What goes wrong: engines that crash, engines that hang, engines that are slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.simulation.clock import virtual_loop
from benchmarks.simulation.engine import ScriptedEngine
from benchmarks.simulation.lengths import uniform


@dataclass(frozen=True, slots=True)
class Faults:
    """How often, for each replica. Without arguments nothing goes wrong."""

    mean_between_s: float = math.inf
    """Between two failures of one replica; memoryless."""
    hang_share: float = 0.5
    """Of the failures; the others are crashes."""
    slow_share: float = 0.0
    """Of the replicas that are slow from the beginning."""
    slow_factor: float = 4.0
    """How much slower."""
    seed: int = 0

    def unleash(self, engines: Sequence[ScriptedEngine]) -> FaultLog:
        """Let it begin."""
        log = FaultLog()
        for engine in engines:
            if uniform(self._key(engine, 0, 2)) < self.slow_share:
                engine.slow_by(self.slow_factor)
                log.slow += 1
            self._next(engine, 0, log)
        return log

    def _next(self, engine: ScriptedEngine, number: int, log: FaultLog) -> None:
        if math.isfinite(self.mean_between_s):
            wait_s = -self.mean_between_s * math.log(uniform(self._key(engine, number, 0)))
            loop = virtual_loop()
            loop.happen(loop.time() + wait_s, partial(self._strike, engine, number, log))

    def _strike(self, engine: ScriptedEngine, number: int, log: FaultLog) -> None:
        if engine.alive and not engine.hangs:
            if uniform(self._key(engine, number, 1)) < self.hang_share:
                engine.hang()
                log.hangs += 1
            else:
                engine.crash()
                log.crashes += 1
        self._next(engine, number + 1, log)

    def _key(self, engine: ScriptedEngine, number: int, purpose: int) -> int:
        return ((self.seed * 1_000_003 + engine.index) * 1_000_003 + number) * 3 + purpose


@dataclass(frozen=True, slots=True)
class Sickness:
    """One fault of one replica."""

    kind: Literal["crash", "hang", "slow"]
    slow_factor: float = 1.0
    """How much slower, of a slow one."""
    replica: int = 0
    at_s: float = 0.0
    """When it begins."""

    def unleash(self, engines: Sequence[ScriptedEngine]) -> None:
        """Let it happen, once."""
        engine = engines[self.replica]
        strike: dict[str, Callable[[], None]] = {
            "crash": engine.crash,
            "hang": engine.hang,
            "slow": partial(engine.slow_by, self.slow_factor),
        }
        virtual_loop().happen(self.at_s, strike[self.kind])


@dataclass(slots=True)
class FaultLog:
    """What went wrong."""

    crashes: int = 0
    hangs: int = 0
    slow: int = 0
