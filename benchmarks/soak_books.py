"""Growth of a process tree over thousands of steps: memory, open files and threads."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.process_meter import sizes_mb
from roll.platform.processes import descendants

WARM_UP_S = 60.0
"""Age up to which a process still takes the memory that it needs anyway, in seconds. Measurements
of younger processes do not count for growth."""
REPLACED_WARM_UP_S = 900.0
"""The same age for processes that were replaced in the run, as engines are: an engine touches its
cache for the first time for minutes, takes one piece of 10 MB when it is 12 minutes old, and each
new one begins anew."""
MOST_FITTED = 400
"""Largest number of measurements of one process that a line is fitted to, since all pairs count."""
SHARED = "shared memory of all"


@dataclass(frozen=True, slots=True)
class Look:
    """Measurement of one process at one time."""

    step: float
    """Number of steps that the run had done."""
    age_s: float
    """Age of the process, in seconds."""
    memory_mb: float
    """Anonymous memory, which the process has allocated, in MB. Pages that the process still shares
    with the one it was forked from count in full: a proportional share would grow whenever another
    of the sharing processes ends."""
    files: int
    """Number of open files."""
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a process after the first tenth of the run. Of a process and its successors, which
    have the same name, it is that of the one with the most steps."""

    name: str
    lives: int
    """Number of processes that had this name, one after another."""
    memory_mb: tuple[float, float]
    """Memory at the beginning and at the end of the fitted line, in MB."""
    mb_per_1000_steps: float
    """Slope of the fitted line: the median slope of all pairs of measurements (Theil-Sen). Memory
    that grows without end moves it; one piece that a process keeps moves it little."""
    files: tuple[float, float]
    """Mean number of open files in the first and in the last tenth of the measurements."""
    threads: tuple[float, float]
    """Mean number of threads in the first and in the last tenth of the measurements."""


@dataclass
class Books:
    """Measurements of all descendants of this process."""

    record: Path | None = None
    """File to which each measurement is appended, one JSON object per process and line."""
    _looks: dict[int, list[Look]] = field(default_factory=lambda: defaultdict(list))
    _names: dict[int, str] = field(default_factory=dict)
    _shared: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of a step and the shared memory of all processes together, in MB."""

    def look(self, step: float) -> None:
        """Measure each living process once; this takes about 0.1 s of a core.

        Args:
            step: number of steps that the run has done.
        """
        shared_mb = 0.0
        for pid in descendants(os.getpid()):
            try:
                sizes = sizes_mb(pid)
                threads = _threads(pid)
                files = len(os.listdir(f"/proc/{pid}/fd"))
                age_s = _age_s(pid)
                name = _name(pid)
            except (OSError, IndexError, ValueError):  # the process has ended meanwhile
                continue
            shared_mb += sizes.get("Pss_Shmem", 0.0)
            memory_mb = sizes.get("Anonymous", 0.0)
            self.take(pid, name, Look(step, age_s, memory_mb, files, threads))
        self._shared.append((step, shared_mb))

    def take(self, pid: int, name: str, look: Look) -> None:
        """Add a measurement of the process `pid`, which has this name."""
        self._names[pid] = name
        self._looks[pid].append(look)
        if self.record is not None:
            with self.record.open("a") as file:
                file.write(json.dumps({"pid": pid, "name": name, **asdict(look)}) + "\n")

    def looks(self, pid: int) -> list[Look]:
        """Return all measurements of one process."""
        return list(self._looks[pid])

    def growths(self, steps: int) -> list[Growth]:
        """Return the growth for every process name of which one process has measurements over at
        least a tenth of the steps, with the largest slope first.

        Args:
            steps: number of steps of the whole run.
        """
        pids: dict[str, list[int]] = defaultdict(list)
        for pid, name in self._names.items():
            pids[name].append(pid)
        found = []
        for name, own in pids.items():
            young_s = WARM_UP_S if len(own) == 1 else REPLACED_WARM_UP_S
            grown = [
                [
                    look
                    for look in self._looks[pid]
                    if look.step >= steps / 10 and look.age_s > young_s
                ]
                for pid in own
            ]
            longest = max(grown, key=lambda looks: looks[-1].step - looks[0].step if looks else 0)
            if longest and longest[-1].step - longest[0].step >= steps / 10:
                found.append(fitted(name, len(own), longest))
        return sorted(found, key=lambda growth: -growth.mb_per_1000_steps)

    def shared(self, steps: int) -> Growth:
        """Return the growth of the shared memory that all processes together have mapped. Files in
        shared memory that no process has mapped are not counted."""
        late = [Look(step, 0, mb, 0, 0) for step, mb in self._shared if step >= steps / 10]
        return fitted(SHARED, 1, late)


def fitted(name: str, lives: int, looks: Sequence[Look]) -> Growth:
    """Fit a line to the memory of one process, and return the growth.

    Args:
        name: name of the process.
        lives: number of processes that had this name.
        looks: measurements, in the order of their steps.
    """
    thinned = looks[:: max(1, len(looks) // MOST_FITTED)]
    steps = np.array([look.step for look in thinned])
    memory_mb = np.array([look.memory_mb for look in thinned])
    before, after = np.triu_indices(len(thinned), 1)
    apart = steps[after] > steps[before]  # several measurements fall into a long step
    before, after = before[apart], after[apart]
    slopes = (memory_mb[after] - memory_mb[before]) / (steps[after] - steps[before])
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    start = median(memory_mb - slope * steps)
    tenth = max(1, len(looks) // 10)
    first, last = looks[:tenth], looks[-tenth:]
    return Growth(
        name,
        lives,
        (float(start + slope * looks[0].step), float(start + slope * looks[-1].step)),
        1000 * slope,
        (fmean(look.files for look in first), fmean(look.files for look in last)),
        (fmean(look.threads for look in first), fmean(look.threads for look in last)),
    )


def _threads(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` from the third one (the state) on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _age_s(pid: int) -> float:
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _name(pid: int) -> str:
    """Return a name for a process: its title; and that of its parent, if several processes may have
    the same title."""
    own = _title(pid)
    if own.startswith("ray::actor") or own.startswith("ray::re"):
        return own
    return f"{own} < {_title(int(_stat(pid)[1]))}"


def _title(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    names = [word.rpartition("/")[2] for word in words if word and not word.startswith("-")]
    if "python" not in names[0]:
        return names[0][:40]
    module = words[words.index("-m") + 1] if "-m" in words else " ".join(names[1:2])
    return f"python {module}"[:40]
