"""Progress of a run, read from its folder: steps, time left, and whether its process runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from roll.output_dir.lock_owner import read_owner
from roll.output_dir.resume import LOCK
from roll.report.read import Run
from roll.report.records import METRICS, Record

LATEST = 20
"""Number of the latest steps from which times are taken."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as it can be told from its folder."""

    status: str
    """`running`, `silent` (a process has the folder, but no record came for many times the usual
    time), or as `Run.status`."""
    done: int
    planned: int | None
    """Number of steps; None if it cannot be read."""
    usual_s: float | None
    """Median time from one record to the next, in seconds; None before the first step."""
    waited_s: float
    """Time since the last record, in seconds."""

    @property
    def left_s(self) -> float | None:
        """Time until the last step ends at the present speed, in seconds; None if unknown."""
        if self.planned is None or self.usual_s is None:
            return None
        return max(0.0, (self.planned - self.done) * self.usual_s)

    @property
    def ended(self) -> bool:
        """True if no process works on the run."""
        return self.status not in ("running", "silent")


SILENT = 10.0
"""A run is silent if it has written nothing for this many times its usual time."""
SILENT_S = 60.0
"""Time before which no run is silent, in seconds."""


def progress(run: Run, now_s: float) -> Progress:
    """Return how far a run has come.

    Args:
        now_s: the time now, in seconds since 1970.
    """
    planned = run.config.get("max_steps")
    usual_s = _usual(run.training)
    waited_s = max(0.0, now_s - (run.folder / METRICS).stat().st_mtime)
    owner = read_owner(run.folder / LOCK)
    status = run.status
    if owner is not None and (not owner.is_near or owner.runs_here()):
        late = usual_s is not None and waited_s > max(SILENT_S, SILENT * usual_s)
        status = "silent" if late else "running"
    return Progress(
        status,
        len(run.training),
        planned if isinstance(planned, int) else None,
        usual_s,
        waited_s,
    )


def _usual(training: Sequence[Record]) -> float | None:
    """Return the median time of the latest steps, with what lies between two, in seconds."""
    taken = [
        record["time/step_s"]
        + record.get("time/validate_s", 0.0)
        + record.get("time/checkpoint_s", 0.0)
        for record in training[-LATEST:]
        if math.isfinite(record["time/step_s"])
    ]
    return median(taken) if taken else None


def brief_time(seconds: float) -> str:
    """Return a time for people, such as `12 s`, `3 min 05 s` or `2 h 40 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
