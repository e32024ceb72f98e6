"""Numbers of running processes, read from the machine's /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """Sums over some processes."""

    cpu_s: float
    """CPU time, with that of ended children that were waited for."""
    memory: int
    """Bytes in memory; pages that several share count once for each."""
    tasks: int
    """Processes and threads."""


def read_usage(pids: Iterable[int]) -> Usage:
    """Return the sums over processes; those that have ended count nothing."""
    ticks = pages = tasks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        tasks += int(fields[17]) if fields[0] not in (b"Z", b"X") else 0
        pages += int(fields[21])
    return Usage(ticks / _TICKS_PER_S, pages * _PAGE, tasks)


def shared_memory(pids: Iterable[int], base: int) -> int:
    """Return the bytes in memory of processes; pages that several share count once.

    Where the kernel does not tell, shared pages count for each process, except the first `base`
    bytes, which all have from the template.
    """
    total, estimated = 0, 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):
            continue
        except PermissionError:
            estimated += max(0, read_usage([pid]).memory - base)
    return total * 1024 + (estimated + base if estimated else 0)


def descendants(roots: Iterable[int]) -> Iterator[int]:
    """Yield the pids of processes, and of all that they started and that still have a parent."""
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                    waiting += map(int, file.read().split())
            except (FileNotFoundError, ProcessLookupError):
                continue


def size_and_memory(pid: int) -> tuple[int, int]:
    """Return the bytes of addresses, and of memory, that a process has."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        size, memory = file.read().split()[:2]
    return int(size) * _PAGE, int(memory) * _PAGE
