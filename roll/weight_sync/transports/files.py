"""A transfer through a shared folder, for hosts that share a file system and nothing else.

Each push has a folder of its own. A file is written under another name and then renamed, so it is
complete when it appears. A bucket's files are removed when all receivers have read them, the folder
when the push is over. The leading sender locks its folder. A killed run leaves a folder without a
lock, which the next push removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError, failure
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import receiver_name, sender_name
from roll.weight_sync.push_plan import Bucket, largest, plan, runs
from roll.weight_sync.receive_buffer import PrivateBuffer, ReceiveBuffer
from roll.weight_sync.transports.board_handshake import ReceiverNotes, SenderNotes

FOLDER_PREFIX = "roll-weights-"
CLAIM_S = 60.0
"""Age from which a folder without its final name is left over, in seconds: a living process locks
and renames its folder at once."""
_LOCK = "lock"
_PAUSE_S = (0.0002, 0.02)
"""Shortest and longest time between two checks of the folder, in seconds."""
_RENEWAL_S = (0.1, 1.0)
"""Shortest and longest time between two renewals of the folder's times, in seconds."""
_LEAVE_S = 0.5
"""Longest time that `close` waits, after a stopped push, for the others to read why, in seconds."""


class FilesSender:
    """A sender's end of a transfer through files, in one rank of the trainer."""

    groups_made = 0

    def __init__(
        self,
        channel: Channel,
        manifest: Manifest,
        sender: int,
        size: int,
        abort: Abort,
        *,
        verify: bool,
    ) -> None:
        """Agree as `SenderEnd` says. A dead process is noticed only by the time limit or an
        abort."""
        self._folder = Path(channel.address)
        self._manifest = manifest
        self._sender = sender
        self._timeout_s = channel.timeout_s
        self._receivers = [receiver_name(i) for i in range(channel.num_receivers)]
        self._lock = _claim(self._folder) if sender == 0 else None
        self._board = FolderBoard(channel, sender_name(sender))
        self._others = [*self._receivers, *(sender_name(i) for i in range(1, channel.num_senders))]
        abort.when_given_up(self._board.give_up)
        try:
            self._notes = SenderNotes(self._board, channel, manifest, sender, verify=verify)
            self._memory = torch.empty(size, dtype=torch.uint8)
        except Exception as error:
            if not isinstance(error, WeightSyncError):  # others have told the reason or know it
                self._board.give_up(failure(error))
            self.close()
            raise

    def memory(self, index: int) -> Tensor:
        """Return this sender's own memory, once all receivers have read bucket `index - 2`.

        So at most two buckets lie in the folder.
        """
        for name in self._receivers if index >= 2 else ():
            self._board.read(f"read-{index - 2}/{name}", name)
        _bucket_file(self._folder, index - 2, self._sender).unlink(missing_ok=True)
        return self._memory

    def publish(self, index: int, bucket: Bucket) -> None:
        """Write this sender's shares of bucket `index` to a file of their own, empty if it has
        none."""
        own = runs(self._manifest, bucket, self._sender)
        parts = [self._memory[first:end].numpy() for first, end in own]
        _write(_bucket_file(self._folder, index, self._sender), parts)

    def finish(self, checksum: Checksum | None) -> str | None:
        return self._notes.finish(checksum)

    def stop(self, reason: str) -> None:
        self._notes.stop(reason)

    def close(self) -> None:
        """Remove the folder, at the leading sender; do nothing at the others.

        After a stopped push the folder stays until the other processes have read why, if need be in
        the background.
        """
        lock, self._lock = self._lock, None
        if lock is None:
            return

        def remove() -> None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(lock)

        def remove_late() -> None:
            self._board.let_leave(self._others, self._timeout_s)
            remove()

        if self._board.let_leave(self._others, _LEAVE_S):
            remove()
        else:
            threading.Thread(target=remove_late, name="roll-late-readers", daemon=True).start()


class FilesReceiver:
    """A receiver's end of a transfer through files, in one rank of an engine.

    Args:
        index: number of this receiver, below `channel.num_receivers`.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel = channel
        self._folder = Path(channel.address)
        self._name = receiver_name(index)
        self._board = FolderBoard(channel, self._name)
        self._notes = ReceiverNotes(self._board, index)
        self.manifest = self._notes.manifest
        self.verify = self._notes.verify
        self._plan: Sequence[Bucket] = ()

    def accept(self) -> None:
        """Agree as `ReceiverEnd.accept` does, and prepare memory for one bucket."""
        self._notes.accept()
        self._plan = plan(self.manifest, self._channel)
        self._receive_buffer = PrivateBuffer(largest(self._plan))

    def fail(self, reason: str) -> None:
        self._notes.fail(reason)

    def take(self, index: int) -> ReceiveBuffer:
        """Wait for the files of bucket `index`, read them into the only buffer, and say so."""
        # One buffer is enough: the next bucket waits in its file.
        self._receive_buffer.recycle()
        raw: Any = self._receive_buffer.memory.numpy()  # numpy's stubs do not declare it a buffer
        memory = memoryview(raw)
        for sender in range(self._channel.num_senders):
            own = runs(self.manifest, self._plan[index], sender)
            if own:
                file = _bucket_file(self._folder, index, sender)
                self._board.wait(file, sender_name(sender))
                _read(file, [memory[first:end] for first, end in own])
        self._board.post(f"read-{index}/{self._name}", {"ok": True})
        return self._receive_buffer

    def give_back(self, index: int) -> None:
        """Do nothing: `take` has reported already that the bucket is read."""

    def end(self) -> str | None:
        return self._notes.end()

    def done(self) -> None:
        self._notes.done()

    def close(self) -> None:
        """Do nothing: no connection or descriptor is open."""


class FolderBoard:
    """Notice board whose notes are small JSON files in the push's folder.

    Args:
        name: name of this process on the board.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._folder = Path(channel.address)
        self._timeout_s = channel.timeout_s
        self._name = name

    def post(self, key: str, note: dict[str, Any]) -> None:
        _write(self._note(key), [json.dumps(note).encode()])

    def read(self, key: str, peer: str) -> dict[str, Any]:
        file = self._note(key)
        self.wait(file, peer)
        note: dict[str, Any] = json.loads(_reading(file, Path.read_text))
        return note

    def stop(self, reason: str) -> None:
        if not self._note("stop").exists():  # the first reason is the cause
            self.post("stop", {"stop": reason})
        self.post(f"left/{self._name}", {"ok": True})

    def wait(self, file: Path, peer: str) -> None:
        """Wait until `file` exists; `peer` only names the late one in the error.

        While it is missing, a stop ends the wait: first post that this process has left.

        Raises:
            WeightSyncError: `file` is late, as it is if the folder is gone, or the transfer was
                stopped.
        """
        deadline = time.monotonic() + self._timeout_s
        pause_s, longest_s = _PAUSE_S
        renewal = _Renewal(self._folder)
        while not file.exists():
            renewal.renew_if_due()
            if self._note("stop").exists():
                reason = json.loads(_reading(self._note("stop"), Path.read_text))["stop"]
                self.post(f"left/{self._name}", {"ok": True})
                raise WeightSyncError(f"the transfer was stopped: {reason}")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight transfer: waited {self._timeout_s:g} s for {peer} to write {file}; "
                    "it may have died, hang, or not see this folder"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)

    def give_up(self, reason: str) -> None:
        """Stop the transfer, from any thread; a wait in this process ends too. Ignore errors."""
        with contextlib.suppress(WeightSyncError):
            self.stop(reason)

    def let_leave(self, others: Sequence[str], limit_s: float) -> bool:
        """Wait, after a stop, until all `others` have read why.

        Returns:
            False if that took longer than `limit_s` seconds, else True.
        """
        deadline, renewal = time.monotonic() + limit_s, _Renewal(self._folder)
        while self._note("stop").exists():
            if all(self._note(f"left/{name}").exists() for name in others):
                break
            if time.monotonic() > deadline:
                return False
            renewal.renew_if_due()
            time.sleep(_PAUSE_S[1])
        return True

    def _note(self, key: str) -> Path:
        """Return the path of the note under `key`."""
        return self._folder / f"{key.replace('/', '-').replace(' ', '-')}.json"


class _Renewal:
    """Renewal of a folder's times, now and then during a wait.

    An NFS client remembers for half a minute or longer that a file was not there. It asks the
    server again as soon as it has seen a change of the folder, and this is such a change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pause_s, self._longest_s = _RENEWAL_S
        self._due_s = time.monotonic() + self._pause_s

    def renew_if_due(self) -> None:
        """Renew the times if the last renewal is long ago; ignore a folder that is not there."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        self._due_s = now_s + self._pause_s


def _bucket_file(folder: Path, index: int, sender: int) -> Path:
    """Return the path of the file with one sender's pieces of a bucket."""
    return folder / f"bucket-{index}-of-sender-{sender}"


def _write(file: Path, parts: list[Any]) -> None:
    """Write `parts` to `file`, which appears complete or not at all.

    Raises:
        WeightSyncError: the file cannot be written.
    """
    beside = file.with_name(file.name + ".part")
    try:
        with beside.open("wb", buffering=0) as stream:
            for part in parts:
                rest = memoryview(part).cast("B")
                while len(rest):  # one call writes at most 2 GiB
                    rest = rest[stream.write(rest) :]
        beside.replace(file)
    except OSError as error:
        raise WeightSyncError(
            f"weight transfer: could not write {file}: {error}; the folder must be writable, and "
            "goes when the sender ends"
        ) from error


def _read(file: Path, parts: list[memoryview]) -> None:
    """Fill `parts`, one after another, with the bytes of `file`.

    Raises:
        WeightSyncError: the file cannot be read, or is too short.
    """

    def fill(path: Path) -> None:
        """Fill `parts` from `path` without buffering; raise OSError if the file is too short."""
        with path.open("rb", buffering=0) as stream:
            for part in parts:
                rest = part
                while len(rest):
                    count = stream.readinto(rest)
                    if not count:
                        raise OSError(f"it ends {len(rest)} bytes early")
                    rest = rest[count:]

    _reading(file, fill)


def _reading(file: Path, how: Callable[[Path], Any]) -> Any:
    """Return `how(file)`; turn an OSError into a WeightSyncError.

    Args:
        how: function that reads the file.
    """
    try:
        return how(file)
    except OSError as error:
        raise WeightSyncError(
            f"weight transfer: could not read {file}: {error}; the sender's process probably ended"
        ) from error


def _claim(folder: Path) -> int:
    """Make and lock the folder of a push; remove folders of earlier pushes whose owner is dead.

    The lock ends with this process, at the latest.

    Returns:
        The file descriptor of the lock.

    Raises:
        WeightSyncError: the folder cannot be made or locked.
    """
    made = folder.with_name(f".{folder.name}")
    lock = -1
    try:
        made.mkdir(parents=True)
        lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(folder)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(made, ignore_errors=True)
        raise WeightSyncError(
            f"weight transfer: could not make the folder {folder}: {error}; it must be on a file "
            "system that can be written to and locked"
        ) from error
    for other in folder.parent.glob(FOLDER_PREFIX + "*"):
        if other != folder:
            _remove_if_orphaned(other)
    for other in folder.parent.glob(f".{FOLDER_PREFIX}*"):  # its owner died before the new name
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > CLAIM_S:
                _remove_if_orphaned(other)
    return lock


def _remove_if_orphaned(folder: Path) -> None:
    """Remove the folder of a push, unless a living process holds its lock; ignore all errors."""
    with contextlib.suppress(OSError):  # removed just now, or locked by a living owner
        lock = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
