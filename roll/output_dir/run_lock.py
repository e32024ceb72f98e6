"""Lock that allows one run at a time in an output folder; it becomes void when its run is gone.

The lock is a file that names the owner: the machine, the process and the start time. On the same
machine, a new run looks the process up by number and start time, since numbers are used again. From
another machine or container a process cannot be looked up. Therefore the owner touches the file
every few seconds. A new run that finds such a file waits for the next touch; without one for long
enough, the lock is void. An owner that was silent for that long and continues may find another run
in the folder. Then the owner ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from roll.core.errors import ConfigError, FolderLostError
from roll.output_dir.lock_owner import Owner, read_owner
from roll.output_dir.resume import LOCK, make_writable, set_aside

logger = logging.getLogger(__name__)

BEAT_S = 10.0
"""Time between two touches of the file, in seconds."""
SILENT_S = 60.0
"""Time without a touch after which an owner that cannot be looked up counts as gone, in seconds."""
POLL_S = 0.5
"""Time between two checks for a touch, in seconds."""


class RunLock:
    """Context manager; inside its block, no other run can begin in the folder.

    Raises:
        ConfigError: on entry: another run is in the folder, or the folder cannot be written.
        FolderLostError: on exit: another run has taken the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the lock; entering the block takes the folder.

        Args:
            beat_s: time between two touches of the file, in seconds.
            silent_s: time without a touch after which an owner that cannot be looked up counts as
                gone, in seconds.
            on_loss: called once, in a thread of the lock, when another run has taken the folder. If
                left out, the main thread is interrupted as by Ctrl-C.
        """
        self._folder = folder
        self._beat_s = beat_s
        self._silent_s = silent_s
        self._on_loss = on_loss or _interrupt_main
        self._owner = Owner.this_process()
        self._made_here = self._holds = False
        self._loss = ""
        self._taking = threading.Lock()
        self._end = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="roll-run-lock", daemon=True)

    @property
    def path(self) -> Path:
        """Path of the lock file, which may not exist."""
        return self._folder / LOCK

    def __enter__(self) -> Self:
        """Take the folder, which may wait for `silent_s` (see `take`), and begin to touch the
        file."""
        self.take()
        self._beats.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._beats.join()
        # Errors mean that there is no lock to remove: the folder is gone, the disk is lost, or
        # other runs are waiting for the lock.
        with contextlib.suppress(OSError, ConfigError), _alone(self._folder):
            owner = read_owner(self.path)
            if owner == self._owner:
                self.path.unlink()
            elif owner is not None and self._holds:
                self._loss = self._loss or str(owner)
            if self._made_here:
                self._folder.rmdir()  # fails, as it should, unless the folder is empty
        if self._loss:
            raise FolderLostError(
                f"output_dir: this run has ended, because {self._folder} is another's: "
                f"{self._loss}. This process was stopped or cut off from the disk for longer than "
                f"{self._silent_s:g} s. Look at metrics.jsonl before you use what is there: both "
                "may have written to it"
            )

    def take(self) -> None:
        """Write the lock file as soon as it is clear that no other run holds the folder. May be
        called again after the folder was renamed."""
        self._made_here = not self._folder.exists()
        watch: _Watch | None = None
        while (found := self._try(watch)) is not None:
            if watch is None or watch.owner != found.owner:
                logger.warning(
                    "output_dir: %s has the lock of a run that cannot be looked up from here: "
                    "%s. Waiting for a sign of life, at most %g s; without one, this run begins",
                    self._folder,
                    found.owner,
                    self._silent_s,
                )
                watch = found
            time.sleep(min(POLL_S, self._silent_s / 10))

    def begin_anew(self) -> None:
        """Rename the folder with its content, and take a new, empty one."""
        with self._taking:
            with _alone(self._folder):
                set_aside(self._folder)
                # After the folder is renamed, another run can take the new one first. The lock
                # found there is then the other run's.
                self._holds = read_owner(self.path) == self._owner
            self.take()

    def _try(self, watch: _Watch | None) -> _Watch | None:
        """Take the folder and return None, or return the lock whose owner may still be alive.

        Args:
            watch: the lock that an earlier attempt found; None in the first attempt.

        Raises:
            ConfigError: the owner of the lock is alive, or the lock cannot be read.
        """
        with _alone(self._folder, make=True):
            make_writable(self._folder)
            try:
                owner = read_owner(self.path)
            except OSError as error:
                raise ConfigError(
                    f"output_dir: {self.path} cannot be read ({error.strerror}), so another run "
                    "may be in the folder; mend the disk or the file's rights, or give this run "
                    "another output_dir"
                ) from None
            if owner is not None and not (self._holds and owner == self._owner):
                if owner.is_near:
                    if owner.runs_here():
                        raise ConfigError(_refusal(self._folder, owner))
                elif (silent_s := _silent_s(self.path)) is not None:
                    found = _Watch(owner, self.path.stat().st_mtime_ns, time.monotonic())
                    if watch is not None and watch.owner == owner:
                        if watch.touched_ns != found.touched_ns:
                            raise ConfigError(_refusal(self._folder, owner))
                        # Time passed here counts as well, because the file's time stamp may come
                        # from a wrong clock.
                        silent_s = max(silent_s, found.seen - watch.seen)
                    if silent_s < self._silent_s:
                        return found
            self._write()
            self._holds = True
            return None

    def _beat(self) -> None:
        """Touch the lock file again and again until the end; if the folder becomes another run's,
        log it and call `_on_loss`."""
        last = _awake_s()
        while not self._end.wait(self._beat_s):
            with self._taking:
                self._loss = self._lost(_awake_s() - last)
                if self._loss:
                    break
                last = self._touch(last)
        if self._loss and not self._end.is_set():
            logger.error("output_dir: %s is another's: %s; ending", self._folder, self._loss)
            self._on_loss()

    def _touch(self, last: float) -> float:
        """Touch the lock file; if somebody has removed it, write it again.

        Args:
            last: time of the last sign of life of this thread, by `_awake_s`.

        Returns:
            Time of the new sign of life; `last` if the disk gave an error, or if the file is gone
            after a silence so long that it may be another run that has removed it.
        """
        with contextlib.suppress(OSError):  # the run itself reports a bad disk
            try:
                os.utime(self.path)
            except FileNotFoundError:
                # If the folder is gone, too, or others wait for it, the next beat tries again.
                with contextlib.suppress(FileNotFoundError, ConfigError), _alone(self._folder):
                    if _awake_s() - last >= self._silent_s:
                        return last
                    if self._holds and read_owner(self.path) is None:
                        self._write()
            return _awake_s()
        return last

    def _write(self) -> None:
        """Write the lock file; only inside `_alone`."""
        self.path.write_text(json.dumps(asdict(self._owner), indent=1) + "\n")

    def _lost(self, silent_s: float) -> str:
        """Return a description of how the folder was lost; empty if it was not lost.

        Args:
            silent_s: time since this run touched the file, in seconds.
        """
        if not self._holds:
            return ""
        try:
            owner = read_owner(self.path)
        except OSError:  # the run itself reports a bad disk
            return ""
        if owner is not None:
            return "" if owner == self._owner else str(owner)
        if silent_s < self._silent_s or self.path.exists():
            return ""
        return f"its {LOCK} is gone after a silence of {silent_s:.0f} s"


@dataclass(frozen=True, slots=True)
class _Watch:
    """A lock whose owner cannot be looked up, as found at one moment."""

    owner: Owner
    touched_ns: int
    seen: float
    """Time when the lock was found, in seconds of the monotonic clock."""


def _refusal(folder: Path, owner: Owner) -> str:
    """Return the message that another run is in the folder, with ways out."""
    stop = f"stop it (kill {owner.pid})" if owner.is_near else "stop it there"
    said = "" if owner.is_near else ", which has just given a sign of life"
    return (
        f"output_dir: a run is in {folder} already: {owner}{said}. "
        f"Two would overwrite each other's files: wait for its end, {stop}, "
        "or give this run another output_dir"
    )


def _silent_s(path: Path) -> float | None:
    """Return the seconds since the last touch of the file; None if the file is gone.

    The time is measured with a second file in the same folder, so both time stamps come from one
    clock.
    """
    probe = path.with_name(f".{LOCK}.{os.getpid()}")
    probe.touch()
    try:
        return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path, *, make: bool = False, patience_s: float = 10.0) -> Iterator[None]:
    """Hold the folder exclusively: only one process at a time checks or writes the lock, or renames
    or removes the folder. Without effect on file systems that cannot lock a folder.

    Args:
        make: create the folder if it does not exist.
        patience_s: time limit for the wait for other processes, in seconds.

    Raises:
        ConfigError: the wait took longer than `patience_s`, or the folder cannot be created.
        FileNotFoundError: the folder does not exist, and `make` is not set.
    """
    deadline = time.monotonic() + patience_s
    while True:
        if make:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                make_writable(folder)  # raises an error that says what is wrong
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            if make and time.monotonic() < deadline:
                continue  # a run that ended has removed the folder
            raise
        try:
            _wait_for(handle, folder, deadline, patience_s)
            # While this process waited for its turn, the folder may have been renamed or removed.
            if _is_still(folder, handle):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() > deadline:
            raise ConfigError(f"output_dir: {folder} was replaced for {patience_s:g} s on end")


def _wait_for(handle: int, folder: Path, deadline: float, patience_s: float) -> None:
    """Wait for the exclusive lock; ConfigError after the deadline. Go on without it where the file
    system has no locks."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"output_dir: waited {patience_s:g} s for another run that is beginning in "
                    f"{folder}"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                raise
            return


def _is_still(folder: Path, handle: int) -> bool:
    """Return whether the path still names the folder that was opened as `handle`."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _interrupt_main() -> None:
    """Interrupt the main thread as Ctrl-C does, even while it waits."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def _awake_s() -> float:
    """Return seconds of a clock that also counts the time in which the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
