"""Process trees and their memory, from /proc. Elsewhere than on Linux only this process is seen."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Children of `pid`, their children, and so on."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _numbers(PROC):
        try:
            stat = (PROC / str(entry) / "stat").read_text()
        except OSError:  # gone in the meantime
            continue
        # The name in parentheses may hold anything, even blanks and parentheses.
        children[int(stat.rpartition(")")[2].split()[1])].append(entry)
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children[parent]]
        found += front
    return found


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
    if not folder.is_dir():
        return []
    return [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]
