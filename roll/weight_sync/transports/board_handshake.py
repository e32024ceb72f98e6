"""The handshake of transfers whose processes share a notice board instead of connections.

Key              Posted by             Note
manifest         leading sender        the manifest
offer            leading sender        {digest of the manifest, verify}
agreed/<name>    each other process    {ok} or {failed: why}
verdict          leading sender        {go}
sum/<name>       each other sender     {sum: checksum}
received/<name>  each receiver         {ok}: it has all bytes; of broadcasts only
end              leading sender        {end: checksum}
done/<name>      each receiver         {ok} or {failed: why}
left/<name>      each other sender     {ok}: it reads no more, so the board may be removed

The weights themselves travel by other means: `broadcast.py`, `files.py`. A process that gives up
posts this on the board. A manifest that a process has read for an earlier push is not read again.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_same
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, digest
from roll.weight_sync.names import LEADER, receiver_name, sender_name

MOST_MANIFESTS = 2
"""Number of manifests that a process keeps: those of a push of all tensors and of one without those
that never change."""


class Board(Protocol):
    """Notice board on which all processes of a transfer can post and read notes."""

    def post(self, key: str, note: dict[str, Any]) -> None:
        """Post `note` under `key`.

        Raises:
            WeightSyncError: the board cannot be written to, for example because it is gone.
        """
        ...

    def read(self, key: str, peer: str) -> dict[str, Any]:
        """Wait for the note under `key` and return it; `peer` only names the late one in the error.

        While the note is missing, a stop ends the wait: first post that this process has left.

        Raises:
            WeightSyncError: the note is late, the board is gone, or the transfer was stopped.
        """
        ...

    def stop(self, reason: str) -> None:
        """Post the reason for all readers, unless a process has posted one, and leave the board;
        WeightSyncError if the board is gone."""
        ...


class _Manifests:
    """The manifests that this process has read last. One push is mostly as the one before, and a
    large model's manifest has megabytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, Manifest] = {}

    def read(self, board: Board, wanted: str) -> Manifest:
        """Return the manifest with this digest, from the board unless it was read before."""
        with self._lock:
            found = self._read.pop(wanted, None)
        if found is None:
            found = Manifest.from_json(board.read("manifest", LEADER))
        with self._lock:
            self._read[wanted] = found
            while len(self._read) > MOST_MANIFESTS:
                self._read.pop(next(iter(self._read)))
        return found


_MANIFESTS = _Manifests()


class SenderNotes:
    """A sender's side of the handshake; the constructor returns once all processes have agreed.

    If it raises a WeightSyncError, it has stopped the transfer.

    Args:
        sender: number of this sender; number 0 leads.
        verify: True if the sender makes checksums.
    """

    def __init__(
        self, board: Board, channel: Channel, manifest: Manifest, sender: int, *, verify: bool
    ) -> None:
        self._board = board
        self._sender = sender
        self._helpers = [sender_name(i) for i in range(1, channel.num_senders)]
        self._receivers = [receiver_name(i) for i in range(channel.num_receivers)]
        try:
            if sender == 0:
                board.post("manifest", manifest.to_json())
                board.post("offer", {"digest": digest(manifest), "verify": verify})
                self._expect("agreed", [*self._receivers, *self._helpers])
                board.post("verdict", {"go": True})
            else:
                self._agree(manifest)
        except WeightSyncError as error:
            self.stop(str(error))
            raise

    def wait_received(self) -> None:
        """Wait in the leading sender, before `finish`, until all receivers have all bytes."""
        if self._sender == 0:
            self._expect("received", self._receivers)

    def finish(self, checksum: Checksum | None) -> str | None:
        """Report that everything is sent, and wait until all receivers use the new weights.

        Returns:
            The leading sender's checksum covers the pieces of all senders, another sender's only
            its own. None if `checksum` is None.

        Raises:
            WeightSyncError: a process failed, is late or stopped the transfer. It is not stopped
                here; call `stop`.
        """
        if self._sender > 0:
            total = checksum.hexdigest() if checksum else None
            self._board.post(f"sum/{sender_name(self._sender)}", {"sum": total})
            self._expect("done", self._receivers)
            self._board.post(f"left/{sender_name(self._sender)}", {"ok": True})
            return total
        for note in self._expect("sum", self._helpers):
            if checksum is not None:
                checksum.merge(note["sum"])
        total = checksum.hexdigest() if checksum else None
        self._board.post("end", {"end": total})
        self._expect("done", self._receivers)
        self._expect("left", self._helpers)
        return total

    def stop(self, reason: str) -> None:
        """Stop the transfer; ignore a board that is gone."""
        with contextlib.suppress(WeightSyncError):
            self._board.stop(reason)

    def _agree(self, manifest: Manifest) -> None:
        """Check the manifest against sender 0's, post the result, wait until sender 0 says go.

        Raises:
            WeightSyncError: the manifests differ, or sender 0 is late or stopped the transfer.
        """
        offer = self._board.read("offer", LEADER)
        key = f"agreed/{sender_name(self._sender)}"
        try:
            if digest(manifest) != offer["digest"]:
                check_same(manifest, _MANIFESTS.read(self._board, offer["digest"]), self._sender)
        except WeightSyncError as error:
            self._board.post(key, {"failed": str(error)})
            raise
        self._board.post(key, {"ok": True})
        self._board.read("verdict", LEADER)

    def _expect(self, step: str, names: list[str]) -> list[dict[str, Any]]:
        """Wait for a step's notes of all `names`, then raise WeightSyncError listing failures."""
        notes = []
        failures = []
        for name in names:
            note = self._board.read(f"{step}/{name}", name)
            notes.append(note)
            if "failed" in note:
                failures.append(f"{name}: {note['failed']}")
        if failures:
            raise WeightSyncError("; ".join(failures))
        return notes


class ReceiverNotes:
    """A receiver's side of the handshake; the constructor waits for the sender's offer.

    Every method but `fail` raises the errors of the board; none of them stops the transfer.

    Args:
        index: number of this receiver.
    """

    def __init__(self, board: Board, index: int) -> None:
        self._board = board
        self._name = receiver_name(index)
        self._step = "agreed"
        offer = board.read("offer", LEADER)
        self.manifest = _MANIFESTS.read(board, offer["digest"])
        self.verify: bool = offer["verify"]

    def accept(self) -> None:
        """Agree to the manifest and wait until all other processes have agreed.

        Raises:
            WeightSyncError: a process refused, or the sender gave up or is late.
        """
        self._post({"ok": True})
        self._step = "done"
        self._board.read("verdict", LEADER)

    def fail(self, reason: str) -> None:
        """Post why this receiver gives up, and stop the transfer; ignore a board that is gone."""
        with contextlib.suppress(WeightSyncError):
            self._post({"failed": reason})
            self._board.stop(f"{self._name}: {reason}")

    def received(self) -> None:
        """Post that this receiver has all bytes; the sender must wait for it in `wait_received`."""
        self._board.post(f"received/{self._name}", {"ok": True})

    def end(self) -> str | None:
        """Wait until all is sent; return the leading sender's checksum, None if it made none."""
        checksum: str | None = self._board.read("end", LEADER)["end"]
        return checksum

    def done(self) -> None:
        """Post that this receiver uses the new weights."""
        self._post({"ok": True})

    def _post(self, note: dict[str, Any]) -> None:
        """Post under the present step: `agreed`, after `accept` `done`."""
        self._board.post(f"{self._step}/{self._name}", note)
