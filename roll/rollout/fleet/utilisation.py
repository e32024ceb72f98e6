"""`Utilisation`: the share of time in which each replica has sequences to work on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.core.metrics import Last, Metrics
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.vitals import Vitals


@dataclass
class Utilisation:
    """Busy times of replicas at the last look."""

    _at_s: float | None = None
    _busy_s: dict[int, tuple[Vitals, float]] = field(default_factory=dict)
    """Number of a replica -> its engine, and the time in which that was busy so far."""

    def take(self, replicas: Sequence[Replica], now_s: float) -> Metrics:
        """Return `perf/replicas_busy_mean` since the last call, of several replicas also `_min` and
        `_max`, and the number of the busiest, `perf/busiest_replica`; nothing at the first call.

        Args:
            replicas: replicas; one that is lost just now does not count.
            now_s: time on the clock of the event loop.
        """
        passed_s = None if self._at_s is None else max(now_s - self._at_s, 1e-9)
        shares: dict[int, float] = {}
        for replica in replicas:
            vitals = replica.vitals
            busy_s = vitals.work(now_s).busy_s
            engine, before_s = self._busy_s.get(replica.index, (vitals, 0.0))
            self._busy_s[replica.index] = vitals, busy_s
            if passed_s is not None and not replica.gone:
                shares[replica.index] = (busy_s - (before_s if engine is vitals else 0)) / passed_s
        self._at_s = now_s
        if not shares:
            return Metrics()
        found = {"replicas_busy_mean": math.fsum(shares.values()) / len(shares)}
        if len(replicas) > 1:
            busiest = max(shares, key=shares.__getitem__)
            found["replicas_busy_min"] = min(shares.values())
            found["replicas_busy_max"] = shares[busiest]
            found["busiest_replica"] = busiest
        return Metrics({f"perf/{name}": Last(value) for name, value in found.items()})
