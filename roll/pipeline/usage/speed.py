"""`Speed`: how many operations a second the models of a run do, and what part of the peak it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.config.sections.roles import Role
from roll.core.metrics import Last, Metrics
from roll.distributed.cluster import Cluster
from roll.platform.peaks import peak_tflops
from roll.workers.model import ScoreWorker
from roll.workers.work import Work

logger = logging.getLogger(__name__)

MEASURED = frozenset(
    {Role.ACTOR_TRAIN, Role.REFERENCE, Role.CRITIC, Role.PROCESS_REWARD, Role.TEACHER}
)
"""Roles whose workers note their passes."""
TERA = 10**12


class Speed:
    """Meter of the passes of all models that train or score.

    Args:
        clusters: returns the clusters of the run, by the keys of their roles.
        peak: `cluster.peak_tflops` of the config.
    """

    def __init__(
        self, clusters: Callable[[], Mapping[str, Cluster[Any]]], peak: float | None
    ) -> None:
        self._clusters = clusters
        self._peak = peak
        self._told: set[str] = set()

    def take(self) -> Metrics:
        """Return for each role `perf/<role>/<train or score>_tflops`, the operations of a device in
        a second of its passes, and `..._mfu`, the part of the device's peak, as far as both are
        known; of the passes since the last call.

        Raises:
            WorkerError, WaitTimeoutError: a worker has died, or does not answer.
        """
        asked = {
            name: cluster.beside(ScoreWorker.take_work)
            for name, cluster in self._clusters().items()
            if cluster.role in MEASURED
        }
        found = Metrics()
        for name, answer in asked.items():
            work = answer.result()
            for kind in ("train", "score"):
                parts = [one for one in work if one.kind == kind]
                if parts:
                    found = found | self._metrics(name, kind, parts)
        return found

    def _metrics(self, role: str, kind: str, parts: Sequence[Work]) -> Metrics:
        """Return the metrics of the passes of a role, of which `parts` has one item a device."""
        known = [one.flops for one in parts if one.flops is not None]
        if len(known) < len(parts):
            self._tell(
                f"{role}: the operations of its model are not known, so perf/{role}/{kind}_tflops "
                "and its share of the peak are left out (docs/metrics.md lists the families)"
            )
            return Metrics()
        # Ranks wait for each other, so the slowest one has the time of all.
        seconds = max(max(one.seconds for one in parts), 1e-9)
        tflops = sum(known) / seconds / len(parts) / TERA
        found = {f"perf/{role}/{kind}_tflops": Last(tflops)}
        peak = self._peak or _peak(parts[0])
        if peak is not None:
            found[f"perf/{role}/{kind}_mfu"] = Last(tflops / peak)
        elif parts[0].device is not None:
            self._tell(
                f"the peak of {parts[0].device} in {parts[0].dtype} is not known; for a share of "
                "it (perf/.../..._mfu) set cluster.peak_tflops"
            )
        return Metrics(found)

    def _tell(self, said: str) -> None:
        """Log a sentence, the first time."""
        if said not in self._told:
            self._told.add(said)
            logger.info("%s", said)


def _peak(work: Work) -> float | None:
    """Return the peak of the device that has done the work; None: it is no GPU, or not known."""
    return None if work.device is None else peak_tflops(work.device, work.dtype)
