"""What grows in a process tree over thousands of steps: memory, files and threads, by slopes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression

from benchmarks.process_meter import MB
from roll.platform.processes import descendants

WARM_UP_S = 60.0
"""Of a process's age, in which it still takes the memory that it needs anyway."""
SHARED = "shared memory of all"


@dataclass(frozen=True, slots=True)
class Look:
    """One process at one moment."""

    step: float
    """Steps done by then."""
    age_s: float
    memory_mb: float
    """Anonymous: what it has allocated, pages that it still shares with the one it was forked from
    in full. Not in proportion, which would grow whenever another of these processes ends."""
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """How one process, or its successors of the same name, grew after the first tenth."""

    name: str
    lives: int
    """Processes that had the name, one after the other."""
    memory_mb: tuple[float, float]
    """At the beginning and at the end of the fitted line."""
    mb_per_1000_steps: float
    files: tuple[float, float]
    """Mean of the first and of the last tenth of the looks."""
    threads: tuple[float, float]


@dataclass
class Books:
    """Looks at all descendants of this process."""

    record: Path | None = None
    """File that each look is appended to, a JSON object per process."""
    _looks: dict[int, list[Look]] = field(default_factory=lambda: defaultdict(list))
    _names: dict[int, str] = field(default_factory=dict)
    _shared: list[tuple[float, float]] = field(default_factory=list)

    def look(self, step: float) -> None:
        """Once at each process that lives; a tenth of a second of a core."""
        shared_mb = 0.0
        for pid in descendants(os.getpid()):
            try:
                sizes = _sizes_mb(pid)
                threads = _threads(pid)
                files = len(os.listdir(f"/proc/{pid}/fd"))
                age_s = _age_s(pid)
                self._names[pid] = _name(pid)
            except (OSError, IndexError, ValueError):  # gone in the meantime
                continue
            shared_mb += sizes.get("Pss_Shmem", 0.0)
            memory_mb = sizes.get("Anonymous", 0.0)
            self._looks[pid].append(Look(step, age_s, memory_mb, files, threads))
            self._write({"pid": pid, "name": self._names[pid], **asdict(self._looks[pid][-1])})
        self._shared.append((step, shared_mb))

    def _write(self, look: dict[str, object]) -> None:
        if self.record is not None:
            with self.record.open("a") as file:
                file.write(json.dumps(look) + "\n")

    def looks(self, pid: int) -> list[Look]:
        """At one process."""
        return list(self._looks[pid])

    def growths(self, steps: int) -> list[Growth]:
        """Of every name that was there for at least a tenth of `steps`, the largest slope first."""
        pids: dict[str, list[int]] = defaultdict(list)
        for pid, name in self._names.items():
            pids[name].append(pid)
        found = []
        for name, own in pids.items():
            looks = sorted((look for pid in own for look in self._looks[pid]), key=_step)
            grown = [look for look in looks if look.step >= steps / 10 and look.age_s > WARM_UP_S]
            if len(grown) >= 3 and grown[-1].step - grown[0].step >= steps / 10:
                found.append(fitted(name, len(own), grown))
        return sorted(found, key=lambda growth: -growth.mb_per_1000_steps)

    def shared(self, steps: int) -> Growth:
        """Shared memory of all processes together, that of files in it left out."""
        late = [Look(step, 0, mb, 0, 0) for step, mb in self._shared if step >= steps / 10]
        return fitted(SHARED, 1, late)


def fitted(name: str, lives: int, looks: Sequence[Look]) -> Growth:
    """The line through the memory of all `looks`, which are in the order of their steps."""
    steps = [look.step for look in looks]
    line = linear_regression(steps, [look.memory_mb for look in looks])
    tenth = max(1, len(looks) // 10)
    first, last = looks[:tenth], looks[-tenth:]
    return Growth(
        name,
        lives,
        (line.intercept + line.slope * steps[0], line.intercept + line.slope * steps[-1]),
        1000 * line.slope,
        (fmean(look.files for look in first), fmean(look.files for look in last)),
        (fmean(look.threads for look in first), fmean(look.threads for look in last)),
    )


def _step(look: Look) -> float:
    return look.step


def _sizes_mb(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pairs = (line.split(":") for line in lines)
    return {key: int(rest.split()[0]) * 1024 / MB for key, rest in pairs}


def _threads(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def _stat(pid: int) -> list[str]:
    """Fields of the kernel's line about a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _age_s(pid: int) -> float:
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")


def _name(pid: int) -> str:
    """Title, and whose child it is, where several may have that title."""
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
