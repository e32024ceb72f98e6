"""Progress of a run, read from its folder: steps, time left, and whether its process runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median

from roll.output_dir import run_lock
from roll.output_dir.lock_owner import read_owner
from roll.output_dir.resume import LOCK
from roll.report.read import Run
from roll.report.records import Record

LATEST = 20
"""Number of the latest steps from which times are taken."""


SILENT = 10.0
"""A run is silent if it has written nothing for this many times its usual time."""
SILENT_S = 60.0
"""Time before which no run is silent, in seconds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as it can be told from its folder."""

    status: str
    """See `Run.status`; `running` while a process has the folder, `silent` if it has written no
    record for many times the usual time."""
    done: int
    planned: int | None
    """Number of steps; None if it cannot be read."""
    usual_s: float | None
    """Median time from one record to the next, in seconds; None before the first step."""
    waited_s: float
    """Time since the last record, or since the session began if that is later, in seconds."""

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


def progress(run: Run, now_s: float) -> Progress:
    """Return how far a run has come.

    Args:
        now_s: the time now, in seconds since 1970.
    """
    planned = run.config.get("max_steps")
    usual_s = _usual(run.training)
    since_s = session_of(run.folder, now_s)
    waited_s = max(0.0, now_s - max(run.written_s, since_s or 0.0))
    status = replace(run, state=None).status
    if since_s is not None:
        late = usual_s is not None and waited_s > max(SILENT_S, SILENT * usual_s)
        status = "silent" if late else "running"
    return Progress(
        status, run.done, planned if isinstance(planned, int) else None, usual_s, waited_s
    )


def session_of(folder: Path, now_s: float) -> float | None:
    """Return when the session that has a folder began, in seconds since 1970; None if no living
    process has it. One that cannot be looked up from here lives while it touches its lock."""
    path = folder / LOCK
    owner = read_owner(path)
    if owner is None:
        return None
    try:
        touched_s = path.stat().st_mtime
        began_s = datetime.fromisoformat(owner.since).timestamp()
    except (FileNotFoundError, ValueError):
        return None
    lives = owner.runs_here() if owner.is_near else now_s - touched_s < run_lock.SILENT_S
    return began_s if lives else None


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
