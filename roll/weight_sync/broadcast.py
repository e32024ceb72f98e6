"""A transfer across hosts: collective broadcasts in a group of its own.

Every sender broadcasts its own pieces, so that no rank has to gather what others hold. A TCPStore
on the leading sender's host is the notice board and then the rendezvous of the group. The
process's default group is not touched: a sender is usually a rank of the trainer's, a receiver of
its engine's.

While one bucket is used the next one travels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.layout import Bucket, Piece, largest, layout, stretches
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.posted import ReceiverNotes, SenderNotes
from roll.weight_sync.slots import DeviceSlot, PrivateSlot, Slot


class BroadcastSender:
    """The end of one of the trainer's ranks."""

    def __init__(
        self, channel: Channel, manifest: Manifest, sender: int, size: int, *, verify: bool
    ) -> None:
        """Connect, announce, and return once everybody has agreed.

        Args:
            size: bytes of the fullest bucket.

        Raises:
            WeightSyncError: somebody refused, died or did not answer in time.
        """
        board = StoreBoard(channel, is_host=sender == 0)
        self._notes = SenderNotes(board, channel, manifest, sender, verify=verify)
        self._buckets = [_allocate(channel, size), _allocate(channel, size)]
        self._group: _Group | None = _Group(channel, board.store, sender)

    def memory(self, index: int) -> Tensor:
        assert self._group is not None
        self._group.wait(index - 2)
        return self._buckets[index % 2]

    def publish(self, index: int, bucket: Bucket) -> None:
        assert self._group is not None
        self._group.begin(index, bucket, self._buckets[index % 2])

    def finish(self, checksum: Checksum | None) -> str | None:
        assert self._group is not None
        self._group.wait_all()
        return self._notes.finish(checksum)

    def stop(self, reason: str) -> None:
        """Those before the first bucket read this; later ones notice the broken connection."""
        self._notes.stop(reason)

    def close(self) -> None:
        """Break the connections now: an error's traceback may keep this object alive, and the
        others would wait for its next bucket."""
        self._group = None


class BroadcastReceiver:
    """An engine's end."""

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel = channel
        self._index = index
        self._group: _Group | None = None
        self._board = StoreBoard(channel, is_host=False)
        self._notes = ReceiverNotes(self._board, index)
        self.manifest = self._notes.manifest
        self.verify = self._notes.verify
        self._plan: list[list[Piece]] = []

    def accept(self) -> None:
        """As `ReceiverNotes.accept`; the first buckets are on their way then."""
        channel = self._channel
        self._notes.accept()
        self._plan = layout(self.manifest, channel.bucket_bytes)
        size = largest(self._plan)
        self._slots = (_slot(channel, size), _slot(channel, size))
        self._group = _Group(channel, self._board.store, channel.num_senders + self._index)
        for index in range(min(2, len(self._plan))):
            self._begin(index)

    def fail(self, reason: str) -> None:
        self._notes.fail(reason)

    def take(self, index: int) -> Slot:
        assert self._group is not None
        self._group.wait(index)
        return self._slots[index % 2]

    def give_back(self, index: int) -> None:
        self._slots[index % 2].recycle()
        if index + 2 < len(self._plan):
            self._begin(index + 2)

    def end(self) -> str | None:
        return self._notes.end()

    def done(self) -> None:
        self._notes.done()

    def close(self) -> None:
        """Break the connections now, so that the others notice."""
        self._group = None

    def _begin(self, index: int) -> None:
        assert self._group is not None
        self._group.begin(index, self._plan[index], self._slots[index % 2].memory)


class _Group:
    """All ends in one process group, and the buckets that travel in it."""

    def __init__(self, channel: Channel, store: Store, rank: int) -> None:
        size = channel.num_senders + channel.num_receivers
        self._works: dict[int, list[Any]] = {}
        self._group = _join(channel, store, rank, size)

    def begin(self, index: int, bucket: Bucket, memory: Tensor) -> None:
        """Every end begins the same broadcasts in the same order."""
        works = []
        for sender, first, end in stretches(bucket):
            options = BroadcastOptions()
            options.rootRank = sender
            options.asyncOp = True
            with _broken_off(f"bucket {index}"):
                works.append(self._group.broadcast([memory[first:end]], options))
        self._works[index] = works

    def wait(self, index: int) -> None:
        for work in self._works.pop(index, []):
            with _broken_off(f"bucket {index}"):
                work.wait()

    def wait_all(self) -> None:
        for index in sorted(self._works):
            self.wait(index)


class StoreBoard:
    """Notes in a TCPStore that the leading sender hosts."""

    def __init__(self, channel: Channel, *, is_host: bool) -> None:
        host, _, port = channel.address.rpartition(":")
        self._timeout_s = channel.timeout_s
        try:
            self.store: Store = TCPStore(
                host,
                int(port),
                is_master=is_host,
                timeout=timedelta(seconds=channel.timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            doing = "listen on" if is_host else "reach the sender at"
            raise WeightSyncError(
                f"weight transfer: could not {doing} {channel.address} within "
                f"{channel.timeout_s:g} s: {_first_line(error)}"
            ) from error

    def post(self, key: str, note: dict[str, Any]) -> None:
        try:
            self.store.set(key, json.dumps(note))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: could not post {key!r}: {_first_line(error)}; the sender's "
                "process probably died"
            ) from error

    def read(self, key: str, peer: str) -> dict[str, Any]:
        start = time.monotonic()
        try:
            note: dict[str, Any] = json.loads(self.store.get(key))
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: waited {time.monotonic() - start:.1f} s of "
                f"{self._timeout_s:g} s for {peer} ({key}): {_first_line(error)}"
            ) from error
        if "stop" in note:
            raise WeightSyncError(f"the sender stopped the transfer: {note['stop']}")
        return note

    def stop(self, reason: str) -> None:
        """The leader's notes are the ones that others wait for longest."""
        for key in ("verdict", "end"):
            self.post(key, {"stop": reason})


@contextmanager
def _broken_off(what: str) -> Iterator[None]:
    """Turns the errors of a collective into ours."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: broadcast of {what} broke off: {_first_line(error)}; another "
            "process of the transfer probably died"
        ) from error


def _join(channel: Channel, store: Store, rank: int, size: int) -> Any:
    timeout = timedelta(seconds=channel.timeout_s)
    prefix = PrefixStore("group", store)
    try:
        if channel.collective == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(prefix, rank, size, options)
        return ProcessGroupGloo(prefix, rank, size, timeout)
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: rank {rank} of {size} could not join the broadcast within "
            f"{channel.timeout_s:g} s: {_first_line(error)}"
        ) from error


def _allocate(channel: Channel, num_bytes: int) -> Tensor:
    device = "cuda" if channel.collective == "nccl" else "cpu"
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _slot(channel: Channel, num_bytes: int) -> Slot:
    if channel.collective == "nccl":
        return DeviceSlot(_allocate(channel, num_bytes))
    return PrivateSlot(num_bytes)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
