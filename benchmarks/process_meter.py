"""Meter of a command's time, CPU and memory per step, from outside, over its whole process tree.

The measurement is the same for every framework. A step ends when the command appends a line to a
file. CPU and memory are those of all descendant processes of the command, also of those that have
left their parent (such as Ray or an engine). Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from roll.platform.processes import descendants, rss_bytes

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02
MEMORY_EVERY_S = 0.1
"""Time between two readings of the memory, in seconds. To read that of a dozen processes every
`POLL_S` would take 5 % of a core."""
PROCESSES_EVERY_S = 0.5
NEW_PEAK = 1.03
"""Factor by which the sum of resident sizes must have grown before proportional sizes are read
again, because reading them takes 0.1 s of the measured cores. So a reported peak may be up to 3 %
too low."""
MB = 1e6


@dataclass
class Measured:
    """Measurements of one command."""

    step_s: list[float] = field(default_factory=list)
    """Wall-clock time from one line to the next, in seconds. The first line has no time, so the
    list has one entry less than there are steps."""
    step_cpu_s: list[float] = field(default_factory=list)
    """User and system time of the process tree in the same intervals, in seconds."""
    peak_mb: float = 0.0
    """Largest sum of the proportional set sizes of the process tree (PSS: shared pages count once),
    in MB."""
    peak_parts_mb: dict[str, float] = field(default_factory=dict)
    """Process -> its part of `peak_mb`, largest first."""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends, so that none is
    missed."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def run_measured(
    command: list[str],
    steps_file: Path,
    *,
    env: dict[str, str],
    log: Path,
    timeout_s: float,
    only_times: bool = False,
) -> Measured:
    """Run a command to its end and measure it.

    Args:
        steps_file: file to which the command appends one line per step.
        env: environment variables of the command.
        log: file for the output of the command.
        timeout_s: time limit of the command, in seconds.
        only_times: measure neither CPU time nor memory. Reading these takes time of the measured
            cores, and more for a command with more processes.

    Raises:
        RuntimeError: the command failed or took longer than `timeout_s`; the message ends with the
            last lines of its output.
    """
    measured, cpu, memory = Measured(), CpuBooks(), MemoryBooks()
    marks: list[tuple[float, float]] = []
    size = 0
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                now = time.monotonic()
                grown = steps_file.stat().st_size if steps_file.exists() else 0
                if grown > size:
                    size = grown
                    lines = steps_file.read_bytes().count(b"\n")
                    marks += [(now, 0.0 if only_times else cpu.read_s())] * (lines - len(marks))
                if not only_times:
                    memory.look(now)
                if now - begun > timeout_s:
                    raise RuntimeError(f"no end after {timeout_s:g} s\n{last_lines(log)}")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                for pid in descendants(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {command}\n{last_lines(log)}")
    for (begin_s, begin_cpu), (end_s, end_cpu) in pairwise(marks):
        measured.step_s.append(end_s - begin_s)
        measured.step_cpu_s.append(end_cpu - begin_cpu)
    measured.peak_mb, measured.peak_parts_mb = memory.peak_mb, memory.parts_mb
    return measured


class CpuBooks:
    """Counter of the CPU seconds of all descendants of this process, also of those that have
    ended."""

    def __init__(self) -> None:
        self._before = {pid: spent_s(pid) for pid in descendants(os.getpid())}
        self._seen: dict[int, float] = {}

    def read_s(self) -> float:
        for pid in descendants(os.getpid()):
            spent = spent_s(pid) - self._before.get(pid, 0.0)
            self._seen[pid] = max(spent, self._seen.get(pid, 0.0))
        return sum(self._seen.values())


def spent_s(pid: int) -> float:
    """Return the user and system time of a process in seconds; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The process name, in parentheses, may itself contain blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sizes_mb(pid: int) -> dict[str, float]:
    """Return the kernel's sums over the memory of a process, such as `Anonymous`, in MB.

    Raises:
        OSError: the process has ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pairs = (line.split(":") for line in lines)
    return {key: int(rest.split()[0]) * 1024 / MB for key, rest in pairs}


class MemoryBooks:
    """Record of the largest memory of all descendants of this process, in total and by process."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self.parts_mb: dict[str, float] = {}
        self._pids: list[int] = []
        self._listed_at = 0.0
        self._looked_at = 0.0
        self._largest_rss_mb = 0.0

    def look(self, now: float) -> None:
        """Read the memory if the last reading is old enough. This is cheap unless the memory is
        larger than ever before.

        Args:
            now: present time, of `time.monotonic`.
        """
        if now - self._looked_at < MEMORY_EVERY_S:
            return
        self._looked_at = now
        if now - self._listed_at > PROCESSES_EVERY_S:
            self._pids, self._listed_at = descendants(os.getpid()), now
        rss_mb = sum(rss_bytes(pid) for pid in self._pids) / MB
        if rss_mb < self._largest_rss_mb * NEW_PEAK:
            return
        self._largest_rss_mb = rss_mb
        parts = {pid: pss_mb(pid) for pid in self._pids}
        if sum(parts.values()) > self.peak_mb:
            self.peak_mb = sum(parts.values())
            largest_first = sorted(parts.items(), key=lambda item: -item[1])
            self.parts_mb = {f"{pid} {name_of(pid)}": round(mb, 1) for pid, mb in largest_first}


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process in MB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")) / MB


def name_of(pid: int) -> str:
    """Return a name for a process: that of its Python script, or the first words of its command
    line; `gone` if the process has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    files = [Path(word).name for word in words if word.startswith("/") and word.endswith(".py")]
    return files[0] if files else " ".join(words[:3])[-60:]


def last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def two_cores() -> None:
    """Restrict this process, and all processes that it starts, to two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
