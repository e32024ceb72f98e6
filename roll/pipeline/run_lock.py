"""One run at a time in an output folder: a file says which, and is void when that run is gone.

The file names the machine, the process and since when. On the same machine the process is looked
for, with the moment it began, since numbers of processes are given out again. On another one nobody
can look; there the owner touches the file every few seconds, and a file that is touched no more is
void.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

from roll.core.errors import ConfigError
from roll.pipeline.folder import LOCK, make_writable

BEAT_S = 10.0
"""Between two touches of the file."""
SILENT_S = 60.0
"""Without a touch for so long, an owner on another machine counts as gone."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that writes into a folder."""

    host: str
    machine: str
    """The boot of the machine's kernel and the space of process numbers, which a container has of
    its own: what `pid` is a number in."""
    pid: int
    begun: float
    """When the process was started, in seconds since 1970."""
    since: str
    """When it took the folder."""

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            begun=psutil.Process().create_time(),
            since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        )

    def lives(self, silent_s: float) -> bool:
        """Whether it still runs.

        Args:
            silent_s: since the file was touched.
        """
        if self.machine != _machine() or self.host != socket.gethostname():
            return silent_s < SILENT_S
        try:
            process = psutil.Process(self.pid)
            # The kernel counts in hundredths of a second.
            same: bool = abs(process.create_time() - self.begun) < 0.05
            ended: bool = process.status() == psutil.STATUS_ZOMBIE
            return same and not ended
        except psutil.NoSuchProcess:
            return False


class RunLock:
    """A context manager; inside it, no other run begins in the folder.

    Raises:
        ConfigError: another run is in the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, *, beat_s: float = BEAT_S) -> None:
        self._folder = folder
        self._beat_s = beat_s
        self._owner = Owner.this_process()
        self._made_here = self._holds = False
        self._end = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="roll-run-lock", daemon=True)

    @property
    def path(self) -> Path:
        return self._folder / LOCK

    def __enter__(self) -> Self:
        self.take()
        self._beats.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            if read_owner(self.path) == self._owner:
                self.path.unlink()
            if self._made_here:
                self._folder.rmdir()  # only where the run has left nothing in it

    def take(self) -> None:
        """Write the file; again after the folder was renamed, the file with it."""
        self._made_here = not self._folder.exists()
        make_writable(self._folder)
        with _alone(self.path):
            owner = read_owner(self.path)
            own = self._holds and owner == self._owner
            if owner is not None and not own:
                silent_s = _silent_s(self.path)
                if owner.lives(silent_s):
                    raise ConfigError(_refusal(self._folder, owner, silent_s))
            self.path.write_text(json.dumps(asdict(self._owner), indent=1) + "\n")
            self._holds = True

    def _beat(self) -> None:
        while not self._end.wait(self._beat_s):
            with contextlib.suppress(OSError):  # on a full or lost disk the run has other worries
                os.utime(self.path)


def read_owner(path: Path) -> Owner | None:
    """Who wrote the file; None where there is no file, or one that was cut off."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Owner(**found)
    except (OSError, ValueError, TypeError):
        return None


def _refusal(folder: Path, owner: Owner, silent_s: float) -> str:
    here = owner.machine == _machine()
    stop = f"stop it (kill {owner.pid})" if here else "stop it there"
    said = "" if here else f", which gave a sign of life {silent_s:.0f} s ago"
    return (
        f"output_dir: a run is in {folder} already: host {owner.host}, process {owner.pid}, since "
        f"{owner.since}{said}. Two would overwrite each other's files: wait for its end, {stop}, "
        "or give this run another output_dir"
    )


def _silent_s(path: Path) -> float:
    """By the clock of the file's own machine, which is the one that stamped it."""
    probe = path.with_name(f".{LOCK}.{os.getpid()}")
    probe.touch()
    try:
        return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
    finally:
        probe.unlink()


@contextmanager
def _alone(path: Path, patience_s: float = 10.0) -> Iterator[None]:
    """Of those who look at the file and write it, one at a time, where the disk can tell them
    apart."""
    # The folder, which nobody replaces meanwhile, as the file is.
    handle = os.open(path.parent, os.O_RDONLY)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"output_dir: waited {patience_s:g} s for another run that is beginning in "
                        f"{path.parent}"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                    raise
                break
        yield
    finally:
        os.close(handle)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    names = boot.read_text().strip() if boot.exists() else ""
    return f"{names} {os.readlink(space) if space.is_symlink() else ''}"
