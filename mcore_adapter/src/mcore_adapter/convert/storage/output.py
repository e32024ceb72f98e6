"""Output folders that are either complete or absent.

A folder is written under a hidden name in the parent folder of its destination, flushed to the disk
on request, and then renamed. A process that is killed earlier leaves the hidden folder behind. The
next conversion to the same destination removes it. The writing process holds a lock on its hidden
folder, which the system releases when the process ends; a locked folder is not removed. On a file
system without locks, no hidden folder is removed, because its owner may still write to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_adapter.convert.storage.signals import cleaned_up, signals_delayed
from mcore_adapter.errors import ConversionError

_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for a full disk and an exhausted quota."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
"""Error numbers for a lock on a file system that cannot lock folders."""
PATIENCE_S = 600.0
"""Time limit for the wait for another process that holds the lock of a parent folder, in seconds.
That process may have to remove a large folder before."""


@contextmanager
def complete_or_absent(
    dst: Path, num_bytes: int, *, flush: bool = True, patience_s: float = PATIENCE_S
) -> Iterator[Path]:
    """Yield the folder to write to; rename it to `dst` when the block ends without an error.

    Missing parent folders are made. After an error or a signal the folder itself is removed.

    Args:
        num_bytes: number of bytes that will be written.
        flush: wait for the disk, so that the folder is complete or absent after a power failure.
        patience_s: see `PATIENCE_S`.

    Raises:
        ConversionError: `dst` exists, the disk has too little space before or during writing, or
            another process has held the lock of the parent folder for too long.
    """
    refuse_existing(dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = None, None
    with cleaned_up():
        try:
            with _locked(dst.parent, patience_s) as has_locks:
                if has_locks:
                    _clear_abandoned(dst)
                check_space(dst.parent, num_bytes)
                with signals_delayed():
                    partial = dst.parent / f".{dst.name}.partial-{uuid.uuid4().hex[:8]}"
                    partial.mkdir()
                    lock = os.open(partial, os.O_RDONLY)
                    if has_locks:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield partial
            _rename(partial, dst, flush=flush)
        except BaseException as error:
            if partial is not None:
                with signals_delayed():
                    shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise ConversionError(
                    f"{dst.parent} is full ({errno.errorcode[error.errno]}: {error.strerror}); "
                    f"{_size(num_bytes)} are needed. Nothing was written"
                ) from error
            raise
        finally:
            if lock is not None:
                os.close(lock)


def refuse_existing(dst: Path) -> None:
    """Raise `ConversionError` if `dst` exists, even as an empty folder or a broken link."""
    if dst.exists() or dst.is_symlink():
        raise ConversionError(f"{dst} exists; name a folder that does not, or remove it")


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise `ConversionError` unless the disk of a folder has room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ConversionError(f"{folder} has {_size(free)} free, {_size(num_bytes)} are needed")


def _rename(partial: Path, dst: Path, *, flush: bool) -> None:
    """Rename a complete folder; `flush` waits for the disk before and after.

    Raises:
        ConversionError: `dst` exists, even as an empty folder or a broken link.
    """
    if flush:
        for path in [*partial.rglob("*"), partial]:
            wait_for_disk(path)
    refuse_existing(dst)
    partial.rename(dst)
    if flush:
        wait_for_disk(dst.parent)


def _size(num_bytes: int) -> str:
    """Return a number of bytes as text, in GB or MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _clear_abandoned(dst: Path) -> None:
    """Remove the hidden folders that killed conversions to `dst` left behind; keep locked ones.

    The caller holds `_locked(dst.parent)`.
    """
    left = re.compile(re.escape(f".{dst.name}.partial-") + "[0-9a-f]{8}")
    for folder in [path for path in dst.parent.iterdir() if left.fullmatch(path.name)]:
        if folder.is_symlink() or not folder.is_dir():
            continue
        with suppress(FileNotFoundError):  # its owner has just renamed or removed it
            _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    """Remove a hidden folder whose owner has ended; keep a locked one, which is written to now.

    Raises:
        FileNotFoundError: its owner has just renamed or removed it.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except BlockingIOError:
        pass  # the first process to rename its folder wins
    finally:
        os.close(lock)


@contextmanager
def _locked(folder: Path, patience_s: float) -> Iterator[bool]:
    """Hold a lock on the parent folder of a destination inside the block; wait until it is free.

    It is held only while hidden folders are removed and made. A new hidden folder is not locked for
    a moment, in which another conversion would otherwise take it for abandoned and remove it.

    Yields:
        True; False if the file system has no locks, so that none is held.

    Raises:
        ConversionError: another process has held the lock for `patience_s`.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        yield _wait_for(lock, folder, patience_s)
    finally:
        os.close(lock)


def _wait_for(lock: int, folder: Path, patience_s: float) -> bool:
    """Wait for the lock of the open folder `lock`; see `_locked`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConversionError(
                    f"{folder} has been locked by another process for {patience_s:g} s, which "
                    "removes what a killed one left there, or hangs; wait for it, end it (lslocks "
                    "and fuser name it), or write to another folder"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False


def wait_for_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of entries without their contents, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
