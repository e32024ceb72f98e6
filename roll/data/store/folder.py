"""The folder of the store: one folder for each key, which has its name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from roll.core.errors import DataError, WaitTimeoutError

PATIENCE_S = 900.0
"""Time without progress of another run, which makes the same rows, after which this run fails."""
LOOKS_S = 0.2
"""Time between two looks at the lock of another run."""


@contextmanager
def sole_maker(
    folder: Path,
    patience_s: float = PATIENCE_S,
    flock: Callable[[int, int], None] = fcntl.flock,
) -> Iterator[None]:
    """Hold the lock of the rows in `folder`; other runs wait, and then find the rows made. The
    lock of a process that was killed is free.

    Args:
        patience_s: time limit for a wait in which the files of the other run do not grow.
        flock: function that locks an open file, as `fcntl.flock` does.

    Raises:
        DataError: the folder cannot be written.
        WaitTimeoutError: another run holds the lock and does not get on.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise no_place(folder.parent, error) from error
    try:
        if _wait_for(partial(flock, handle), folder, patience_s):
            for left in folder.parent.glob(f"{folder.name}.*.part"):  # of a maker that was killed
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _wait_for(lock: Callable[[int], None], folder: Path, patience_s: float) -> bool:
    """Wait for the lock; see `sole_maker`. Return whether it is held: where the file system has no
    locks, go on without, and other makers may be at work."""
    before, deadline = -1, time.monotonic() + patience_s
    while True:
        try:
            lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            found = _size_of_parts(folder)
            if found != before:
                before, deadline = found, time.monotonic() + patience_s
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{folder}: another process holds the lock and has written nothing for "
                    f"{patience_s:g} s; end it, or name another folder in `data.cache`"
                ) from None
            time.sleep(LOOKS_S)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return False


def _size_of_parts(folder: Path) -> int:
    """Return the bytes that the maker of `folder` has written so far."""
    size = 0
    for path in folder.parent.glob(f"{folder.name}.*.part/*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # it is complete and has its name now
            continue
    return size


@contextmanager
def made_in_full(folder: Path) -> Iterator[Path]:
    """Give a folder to write into; it gets the name `folder` if no error was raised, else it is
    removed. If another run was faster, its folder stays.

    Raises:
        DataError: the disk is full, or the folder cannot be written.
    """
    part = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir(mode=0o700)
        yield part
        _sync(part)
        try:
            part.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    except OSError as error:
        raise no_place(folder.parent, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk, so that no crash of the machine leaves an
    incomplete one under the name of a complete one."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def no_place(folder: Path, error: OSError) -> DataError:
    """Return the error for a store that cannot be written."""
    return DataError(
        f"tokenized rows cannot be kept in {folder} ({error.strerror or error}); make room there, "
        "or name another folder in `data.cache`"
    )
