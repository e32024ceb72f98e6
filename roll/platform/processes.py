"""State, children and memory of processes, read from /proc. On systems without /proc the functions
find no processes and report 0 bytes."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of `pid`: its children, their children, and so on."""
    children_of = _children if _lists_children() else _children_by_parents().__getitem__
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children_of(parent)]
        found += front
    return found


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a process, as the operating system reports it. The process itself need not
    answer."""

    name: str
    stopped: bool
    """True if a signal (SIGSTOP) has stopped the process and SIGCONT has not resumed it. A halt in
    a debugger does not count."""
    cpu_s: float
    """CPU time that the process has used so far in all its threads, in seconds."""


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if the process has ended, even if it is still a
    zombie."""
    stat = _stat(pid)
    if stat is None:
        return None
    name, fields = stat
    if fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    return ProcessState(name, fields[0] == "T", ticks / os.sysconf("SC_CLK_TCK"))


def stopped_below(pid: int) -> list[str]:
    """Return id and name of each descendant of `pid` that a signal has stopped."""
    looks = {child: process_state(child) for child in descendants(pid)}
    return [
        f"process {child} ({look.name})" for child, look in looks.items() if look and look.stopped
    ]


def rss_bytes(pid: int) -> int:
    """Return the resident memory of one process, in bytes; 0 if it has ended."""
    try:
        fields = (PROC / str(pid) / "statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def tree_rss_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants, in bytes. A page that
    several of them share counts once for each of them."""
    return sum(rss_bytes(each) for each in [pid, *descendants(pid)])


def _numbers(folder: Path) -> list[int]:
    """Return the numbers among the names in a folder; empty if it cannot be read."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:  # the folder does not exist, or its process has ended
        return []


def _lists_children() -> bool:
    """Return whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN). If not, all
    processes must be searched for their parents."""
    return (PROC / f"self/task/{os.getpid()}/children").exists()


def _children(pid: int) -> list[int]:
    """Return the ids of the children of `pid`, collected from all threads of the process: the
    kernel lists a child under the thread that started it."""
    found: list[int] = []
    for thread in _numbers(PROC / str(pid) / "task"):
        try:
            text = (PROC / str(pid) / "task" / str(thread) / "children").read_text()
        except OSError:  # the thread has ended meanwhile
            continue
        found += map(int, text.split())
    return found


def _children_by_parents() -> defaultdict[int, list[int]]:
    """Return the children of each process, found by the parents of all processes, for kernels that
    list no children."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in _numbers(PROC):
        stat = _stat(entry)
        if stat is not None:
            children[int(stat[1][1])].append(entry)
    return children


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """Return the name and the fields of /proc/PID/stat from the state onwards; None if the process
    has ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may contain any characters, even blanks and parentheses.
    head, _, rest = text.rpartition(")")
    return head.partition("(")[2], rest.split()
