"""Faults of the simulated engines: crashes, hangs and slowness."""

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
    """Frequencies of random faults of each replica. By default there are no faults."""

    mean_between_s: float = math.inf
    """Mean time between two failures of one replica, in virtual seconds; the times are drawn from
    an exponential distribution."""
    hang_share: float = 0.5
    """Share of the failures that are hangs; the others are crashes."""
    slow_share: float = 0.0
    """Share of the replicas that are slow from the beginning."""
    slow_factor: float = 4.0
    """Factor by which these replicas are slower."""
    seed: int = 0

    def unleash(self, engines: Sequence[ScriptedEngine]) -> FaultLog:
        """Start to cause faults in the engines; return a log that counts them."""
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
    """Single fault of one replica."""

    kind: Literal["crash", "hang", "slow"]
    slow_factor: float = 1.0
    """Factor by which the replica becomes slower; for `slow` only."""
    replica: int = 0
    """Index of the replica."""
    at_s: float = 0.0
    """Time at which the fault begins, in virtual seconds."""

    def unleash(self, engines: Sequence[ScriptedEngine]) -> None:
        """Plan the fault, which happens once."""
        engine = engines[self.replica]
        strike: dict[str, Callable[[], None]] = {
            "crash": engine.crash,
            "hang": engine.hang,
            "slow": partial(engine.slow_by, self.slow_factor),
        }
        virtual_loop().happen(self.at_s, strike[self.kind])


@dataclass(slots=True)
class FaultLog:
    """Counts of the faults that happened."""

    crashes: int = 0
    hangs: int = 0
    slow: int = 0
