"""A transfer across hosts: collective broadcasts in a process group made for the transfer.

Every sender broadcasts its own pieces, so that no rank has to gather what others hold. A TCPStore
on the leading sender's host is the notice board and then the rendezvous of the group. The
process's default group is not used: in a sender it usually belongs to the trainer, in a receiver
to the engine.

While one bucket is read, the next one travels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore
from torch.distributed import ProcessGroupGloo

from roll.core.errors import WeightSyncError, failure
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import receiver_name, sender_name
from roll.weight_sync.push_plan import Bucket, Piece, largest, layout, sender_runs
from roll.weight_sync.receive_buffer import DeviceBuffer, PrivateBuffer, ReceiveBuffer
from roll.weight_sync.transports.board_handshake import ReceiverNotes, SenderNotes
from roll.weight_sync.transports.store_board import (
    PAUSE_S,
    SLICE_S,
    StoreBoard,
    first_line,
    open_store,
)


class BroadcastSender:
    """A sender's end of a broadcast, in one rank of the trainer."""

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
        """Connect and agree as `SenderEnd` says, and return once all processes have joined."""
        self._board = StoreBoard(channel, sender_name(sender), is_host=sender == 0)
        self._group: _Group | None = None
        abort.when_given_up(self._board.give_up)
        self._others = [
            *(receiver_name(i) for i in range(channel.num_receivers)),
            *(sender_name(i) for i in range(1, channel.num_senders)),
        ]
        try:
            self._notes = SenderNotes(self._board, channel, manifest, sender, verify=verify)
            self._buckets = [_allocate(channel, size), _allocate(channel, size)]
            self._group = _Group(channel, self._board, sender)
        except Exception as error:
            self._board.give_up(failure(error))
            self.close()
            raise

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
        self._notes.stop(reason)

    def close(self) -> None:
        """Break the connections now.

        An error's traceback may keep this object alive, and the others would then wait for its
        next bucket. After a stopped push the notice board stays, for processes that come late.
        """
        self._group = None
        self._board.linger(self._others)


class BroadcastReceiver:
    """A receiver's end of a broadcast, in one rank of an engine.

    Args:
        index: number of this receiver, below `channel.num_receivers`.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel = channel
        self._index = index
        self._group: _Group | None = None
        self._board = StoreBoard(channel, receiver_name(index), is_host=False)
        self._notes = ReceiverNotes(self._board, index)
        self.manifest = self._notes.manifest
        self.verify = self._notes.verify
        self._plan: list[list[Piece]] = []

    def accept(self) -> None:
        """Agree as `ReceiverEnd.accept` does, join the group, start to receive two buckets."""
        channel = self._channel
        self._notes.accept()
        self._plan = layout(self.manifest, channel.bucket_bytes)
        size = largest(self._plan)
        self._slots = (_receive_buffer(channel, size), _receive_buffer(channel, size))
        self._group = _Group(channel, self._board, channel.num_senders + self._index)
        for index in range(min(2, len(self._plan))):
            self._begin(index)

    def fail(self, reason: str) -> None:
        self._notes.fail(reason)

    def take(self, index: int) -> ReceiveBuffer:
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
        """Break the connections now, so that the other processes notice."""
        self._group = None

    def _begin(self, index: int) -> None:
        """Start to receive bucket `index` into the memory of bucket `index - 2`, which must be
        free."""
        assert self._group is not None
        self._group.begin(index, self._plan[index], self._slots[index % 2].memory)


class _Group:
    """The process group of all ends of a transfer, and the broadcasts that run in it."""

    def __init__(self, channel: Channel, board: StoreBoard, rank: int) -> None:
        """Join the group; return once all ranks have joined. The errors are those of `_join`.

        Args:
            rank: the senders have the first ranks, by number; the receivers follow.
        """
        size = channel.num_senders + channel.num_receivers
        self._works: dict[int, list[Any]] = {}
        self._board = board
        self._group = _join(channel, board, rank, size)

    def begin(self, index: int, bucket: Bucket, memory: Tensor) -> None:
        """Start the broadcasts of bucket `index`, which every rank must start in the same order.

        There is one broadcast per run of bytes that one sender holds.
        """
        works = []
        for sender, first, end in sender_runs(bucket):
            options = BroadcastOptions()
            options.rootRank = sender
            options.asyncOp = True
            with _broken_off(f"bucket {index}"):
                works.append(self._group.broadcast([memory[first:end]], options))
        self._works[index] = works

    def wait(self, index: int) -> None:
        """Wait for the broadcasts of bucket `index`; return at once if it was not started."""
        for work in self._works.pop(index, []):
            with _broken_off(f"bucket {index}"):
                self._until_done(work)
                work.wait()

    def _until_done(self, work: Any) -> None:
        """Wait for `work` and watch the board: a peer that hangs breaks no connection.

        Raises:
            WeightSyncError: a process stopped the transfer.
        """
        pause_s, longest_s = PAUSE_S
        look_s = time.monotonic() + SLICE_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)
            if time.monotonic() > look_s:
                self._board.raise_if_stopped()
                look_s = time.monotonic() + SLICE_S

    def wait_all(self) -> None:
        """Wait for all broadcasts that were started."""
        for index in sorted(self._works):
            self.wait(index)


@contextmanager
def _broken_off(what: str) -> Iterator[None]:
    """Turn a collective's RuntimeError into a WeightSyncError.

    Args:
        what: name of the bucket in the message, such as `bucket 3`.
    """
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: broadcast of {what} broke off: {first_line(error)}; another "
            "process of the transfer probably died"
        ) from error


def _join(channel: Channel, board: StoreBoard, rank: int, size: int) -> Any:
    """Return the process group once all ranks have joined.

    A thread joins the group, so that this call can watch the board. If the transfer is stopped
    because a rank never comes, the thread is left behind, still waiting.

    Raises:
        WeightSyncError: a rank did not come in time, or a process stopped the transfer.
    """
    made: Future[Any] = Future()

    def join() -> None:
        try:
            made.set_result(_make_group(channel, rank, size))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            made.set_exception(error)

    threading.Thread(target=join, name="roll-broadcast-group", daemon=True).start()
    while True:
        try:
            return made.result(SLICE_S)
        except TimeoutError:
            board.raise_if_stopped()
        except RuntimeError as error:
            raise WeightSyncError(
                f"weight transfer: rank {rank} of {size} could not join the broadcast within "
                f"{channel.timeout_s:g} s: {first_line(error)}"
            ) from error


def _make_group(channel: Channel, rank: int, size: int) -> Any:
    """Join the transfer's own NCCL or gloo group, apart from torch's default group."""
    timeout = timedelta(seconds=channel.timeout_s)
    # The group gets its own connection to the store: while it waits for the other ranks, reads of
    # the board over the same connection would block.
    prefix = PrefixStore("group", open_store(channel, is_host=False))
    if channel.collective == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(prefix, rank, size, options)
    return ProcessGroupGloo(prefix, rank, size, timeout)


def _allocate(channel: Channel, num_bytes: int) -> Tensor:
    """Return uninitialized memory on the CPU, or with NCCL on the current GPU, uint8
    `[num_bytes]`."""
    device = "cuda" if channel.collective == "nccl" else "cpu"
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _receive_buffer(channel: Channel, num_bytes: int) -> ReceiveBuffer:
    """Return a buffer for a bucket in the kind of memory that `_allocate` returns."""
    if channel.collective == "nccl":
        return DeviceBuffer(_allocate(channel, num_bytes))
    return PrivateBuffer(num_bytes)
