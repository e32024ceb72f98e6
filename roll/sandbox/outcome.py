"""A program and what it is given (`Job`, `Limits`), and how it ended (`Outcome`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath


class Status(StrEnum):
    """The kinds of end that a program can come to."""

    OK = "ok"
    """With exit code 0. It alone says nothing about the answer: a wrong program can do it, too."""
    FAILED = "failed"
    """With another exit code; or a call of a session raised."""
    CRASHED = "crashed"
    """By a signal that nobody but itself or the kernel has sent."""
    CPU_TIME = "cpu_time"
    WALL_TIME = "wall_time"
    MEMORY = "memory"
    """Killed at the limit, or it could not get more and ended with a MemoryError."""
    PROCESSES = "processes"
    OUTPUT = "output"
    NOT_BUILT = "not_built"
    """A compiler refuses its text, so nothing has run; of languages that a host compiles."""
    CANCELLED = "cancelled"
    """Whoever waited for it does not any more."""


_WHOLE = ("processes", "output_bytes", "files")
"""Limits that are whole numbers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Amounts that one program may use. Beyond, it is killed, or gets an error when it asks."""

    cpu_s: float = 10.0
    """CPU time of all its processes together. A busy machine does not use it up."""
    wall_s: float = 30.0
    """Time from start to end. For programs that wait; leave room for a busy machine."""
    memory_mb: float = 1024.0
    """Memory of all its processes together, with Python and the preloaded modules."""
    processes: int = 32
    """Processes and threads at one time."""
    output_bytes: int = 2**20
    """Bytes of standard output, and as many of standard error."""
    files: int = 256
    """Files and folders that it can have, with those that it is given."""
    disk_mb: float = 64.0
    """Size of all its files together."""
    addresses_mb: float | None = None
    """Memory that each process may reserve without using it, as virtual machines of languages do;
    None: `memory_mb`."""

    def __post_init__(self) -> None:
        """Raise ValueError for one that is not above zero, or that is no limit."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None and name == "addresses_mb":
                continue
            whole = name in _WHOLE
            is_number = isinstance(value, int) or (isinstance(value, float) and not whole)
            if not is_number or isinstance(value, bool) or not 0 < value < math.inf:
                kind = "whole" if whole else "finite"
                raise ValueError(f"{name}: expected a {kind} number above 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Job:
    """A program and what it is given."""

    program: str | bytes
    """Text of a program."""
    stdin: str | bytes = b""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Contents of files in its working folder, by relative path."""
    limits: Limits | None = None
    """None: those of the sandbox."""
    language: str = "python"
    """Language of the program, one of `Sandbox.languages`."""

    def __post_init__(self) -> None:
        """Raise ValueError for a path that leads out of the working folder."""
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"files: {name!r} is no path below the program's folder")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a program, as seen from outside: nothing in it is the program's own word but
    what it wrote."""

    status: Status
    exit_code: int | None
    """None if a signal ended it, or if it is a session that goes on."""
    signal: int | None
    """Number of the signal that ended it; None if none did."""
    stdout: str
    """Bytes that are no UTF-8 are shown as \\xff."""
    stderr: str
    cut: bool
    """Whether it wrote more than is kept here."""
    cpu_s: float
    """CPU time of all its processes."""
    wall_s: float
    peak_mb: float
    """Most memory that it had at a time, with Python and the preloaded modules."""
    reason: str
    """One sentence, empty if the status is `ok`."""

    @property
    def ok(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.status is Status.OK


def cancelled(wall_s: float = 0.0) -> Outcome:
    """Return the outcome of a program that was cancelled before it wrote anything; `wall_s` is the
    time that it took."""
    why = "nobody waits for it any more"
    return Outcome(Status.CANCELLED, None, None, "", "", False, 0.0, wall_s, 0.0, why)
