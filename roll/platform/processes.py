"""Process trees and their memory, from /proc. Elsewhere than on Linux only this process is seen."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children, and so on."""
    if not _lists_children():
        return _descendants_by_parents(pid)
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in _children(parent)]
        found += front
    return found


@dataclass(frozen=True, slots=True)
class Look:
    """A process as it is seen from outside, whether or not it answers."""

    name: str
    stopped: bool
    """By a signal (SIGSTOP), until somebody lets it go on; a debugger's halt does not count."""
    cpu_s: float
    """Computed up to now, in all threads."""


def look_at(pid: int) -> Look | None:
    """What a process is doing; None when it has ended (whether or not its parent knows)."""
    stat = _stat(pid)
    if stat is None:
        return None
    name, fields = stat
    if fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Look(name, fields[0] == "T", ticks / os.sysconf("SC_CLK_TCK"))


def stopped_below(pid: int) -> list[str]:
    """Names of the processes below `pid` that a signal has stopped."""
    looks = {child: look_at(child) for child in descendants(pid)}
    return [
        f"process {child} ({look.name})" for child, look in looks.items() if look and look.stopped
    ]


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of one process; 0 when it is gone."""
    try:
        fields = (PROC / str(pid or os.getpid()) / "statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def tree_rss_bytes(pid: int) -> int:
    """Resident memory of a process and all below it; shared pages count once per process."""
    return sum(rss_bytes(each) for each in [pid, *descendants(pid)])


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:  # no such folder, or it went with its process
        return []


def _lists_children() -> bool:
    """Whether the kernel does (CONFIG_PROC_CHILDREN): else all processes must be looked through."""
    return (PROC / f"self/task/{os.getpid()}/children").exists()


def _children(pid: int) -> list[int]:
    """Each is listed with the thread that started it."""
    found: list[int] = []
    for thread in _numbers(PROC / str(pid) / "task"):
        try:
            text = (PROC / str(pid) / "task" / str(thread) / "children").read_text()
        except OSError:  # gone in the meantime
            continue
        found += map(int, text.split())
    return found


def _descendants_by_parents(pid: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _numbers(PROC):
        stat = _stat(entry)
        if stat is not None:
            children[int(stat[1][1])].append(entry)
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children[parent]]
        found += front
    return found


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """Name, and the fields from the state on; None when the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything, even blanks and parentheses.
    head, _, rest = text.rpartition(")")
    return head.partition("(")[2], rest.split()
