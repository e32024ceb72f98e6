"""Who holds an output folder: a process, as others can look it up or cannot."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that writes into a folder."""

    host: str
    machine: str
    """The boot of the machine's kernel and the space of process numbers, which a container has of
    its own: what `pid` is a number in."""
    pid: int
    begun: int
    """When the process was started, in the kernel's ticks since its boot: what no correction of
    the clock moves."""
    since: str
    """When it took the folder."""

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            begun=_begun(os.getpid()),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        )

    @property
    def is_near(self) -> bool:
        """Whether its process can be looked up from here."""
        return self.machine == _machine() and self.host == socket.gethostname()

    def runs_here(self) -> bool:
        """Whether the process, which is near, still runs."""
        try:
            return _begun(self.pid) == self.begun
        except ProcessLookupError:
            return False

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}, since {self.since}"


def read_owner(path: Path) -> Owner | None:
    """Who wrote the file; None where there is no file, or one that was cut off."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        owner = Owner(**found)
        return owner if isinstance(owner.pid, int) and isinstance(owner.begun, int) else None
    except (OSError, ValueError, TypeError):
        return None


def _begun(pid: int) -> int:
    """When a process was started, in ticks since the boot.

    Raises:
        ProcessLookupError: there is none, or it has ended and is only not yet waited for.
    """
    if not Path("/proc/self/stat").exists():  # not Linux
        try:
            return int(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(pid) from None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    # The name before it, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[19])


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    names = boot.read_text().strip() if boot.exists() else ""
    return f"{names} {os.readlink(space) if space.is_symlink() else ''}"
