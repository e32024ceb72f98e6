"""The process that holds an output folder, and a check if that process still runs."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that writes into an output folder."""

    host: str
    machine: str
    """Boot id of the machine's kernel and PID namespace; `pid` is a number in this namespace. A
    container has a PID namespace of its own."""
    pid: int
    begun: int
    """Start time of the process, in the kernel's ticks since boot, which do not change when the
    clock is set."""
    since: str
    """Date and time when the process took the folder."""
    token: str = ""
    """Random; tells two runs in one process apart."""

    @classmethod
    def this_process(cls) -> Owner:
        """Describe this process, with the present time and a new random token."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            begun=_begun(os.getpid()),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            token=secrets.token_hex(8),
        )

    @property
    def is_near(self) -> bool:
        """True if the process can be looked up from here: same host, boot and PID namespace."""
        return self.machine == _machine() and self.host == socket.gethostname()

    def runs_here(self) -> bool:
        """Return True if the process still runs; only valid if `is_near`."""
        try:
            return _begun(self.pid) == self.begun
        except ProcessLookupError:
            return False
        except PermissionError:  # of another user: the process lives, perhaps with a number reused
            return True

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}, since {self.since}"


def read_owner(path: Path) -> Owner | None:
    """Read the owner from a lock file; None if the file is missing or incomplete.

    Raises:
        OSError: the file cannot be read, so it is unknown who has the folder.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        owner = Owner(**found)
        return owner if isinstance(owner.pid, int) and isinstance(owner.begun, int) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def _begun(pid: int) -> int:
    """Return the time when a process was started: in ticks since the boot on Linux, elsewhere in
    seconds since 1970.

    Raises:
        ProcessLookupError: there is no such process, or it has ended and its parent has not
            collected it.
        PermissionError: the process lives, but may not be looked up.
    """
    if not Path("/proc/self/stat").exists():  # not Linux
        try:
            return int(psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(pid) from None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        os.kill(pid, 0)  # /proc may hide the processes of other users
        raise ProcessLookupError(pid) from None
    # The fields follow the process's name, which is in parentheses and may hold any character.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[19])


def _machine() -> str:
    """Return the value of `Owner.machine` for this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    names = boot.read_text().strip() if boot.exists() else ""
    return f"{names} {os.readlink(space) if space.is_symlink() else ''}"
