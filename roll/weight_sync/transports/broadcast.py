"""A transfer across hosts: collective broadcasts in a process group made for the transfer.

Each bucket is one broadcast. Where several senders hold shares of it, one of them gathers these
first; the senders take turns. So the number of broadcasts is that of the buckets, whatever the
number of tensors and senders. A TCPStore on the leading sender's host is the notice board and then
the rendezvous of the groups. The process's default group is not used: in a sender it usually
belongs to the trainer, in a receiver to the engine.

While one bucket is read, the next one travels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, BroadcastOptions, PrefixStore
from torch.distributed import ProcessGroupGloo

from roll.core.errors import WeightSyncError, failure
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.names import receiver_name, sender_name
from roll.weight_sync.push_plan import (
    Bucket,
    broadcaster,
    holds_all,
    largest,
    plan,
    runs,
    used_bytes,
)
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
        self._gathering: _Gathering | None = None
        abort.when_given_up(self._board.give_up)
        self._others = [
            *(receiver_name(i) for i in range(channel.num_receivers)),
            *(sender_name(i) for i in range(1, channel.num_senders)),
        ]
        try:
            self._notes = SenderNotes(self._board, channel, manifest, sender, verify=verify)
            self._buckets = [_allocate(channel, size), _allocate(channel, size)]
            self._group = _Group(channel, self._board, manifest, sender)
            if channel.num_senders > 1:
                self._gathering = _Gathering(channel, self._board, manifest, sender)
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
        memory = self._buckets[index % 2]
        if self._gathering is not None:
            self._gathering.gather(index, bucket, memory)
        self._group.begin(index, bucket, memory)

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
        self._group = self._gathering = None
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
        self._plan: Sequence[Bucket] = ()

    def accept(self) -> None:
        """Agree as `ReceiverEnd.accept` does, join the group, start to receive two buckets."""
        channel = self._channel
        self._notes.accept()
        self._plan = plan(self.manifest, channel)
        size = largest(self._plan)
        self._slots = (_receive_buffer(channel, size), _receive_buffer(channel, size))
        rank = channel.num_senders + self._index
        self._group = _Group(channel, self._board, self.manifest, rank)
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

    def __init__(self, channel: Channel, board: StoreBoard, manifest: Manifest, rank: int) -> None:
        """Join the group; return once all ranks have joined. The errors are those of `_join`.

        Args:
            rank: the senders have the first ranks, by number; the receivers follow.
        """
        size = channel.num_senders + channel.num_receivers
        self._manifest = manifest
        self._works: dict[int, Any] = {}
        self._board = board
        self._group = _join(channel, board, rank, size, "group")

    def begin(self, index: int, bucket: Bucket, memory: Tensor) -> None:
        """Start the broadcast of bucket `index`, which every rank must start in the same order."""
        options = BroadcastOptions()
        options.rootRank = broadcaster(self._manifest, bucket, index)
        options.asyncOp = True
        with _broken_off(f"broadcast of bucket {index}"):
            self._works[index] = self._group.broadcast([memory[: used_bytes(bucket)]], options)

    def wait(self, index: int) -> None:
        """Wait for the broadcast of bucket `index`; return at once if it was not started."""
        if index in self._works:
            with _broken_off(f"broadcast of bucket {index}"):
                _finish(self._works.pop(index), self._board)

    def wait_all(self) -> None:
        """Wait for all broadcasts that were started."""
        for index in sorted(self._works):
            self.wait(index)


class _Gathering:
    """The process group of the senders, in which one of them gathers the shares of a bucket."""

    def __init__(
        self, channel: Channel, board: StoreBoard, manifest: Manifest, sender: int
    ) -> None:
        """Join the group; return once all senders have joined. The errors are those of `_join`."""
        self._manifest = manifest
        self._sender = sender
        self._board = board
        self._group = _join(channel, board, sender, channel.num_senders, "senders")

    def gather(self, index: int, bucket: Bucket, memory: Tensor) -> None:
        """Bring the shares of all senders to the one that broadcasts bucket `index`. Collective.

        Args:
            memory: memory of the bucket, with this sender's shares in their places.
        """
        root, senders = broadcaster(self._manifest, bucket, index), range(self._group.size())
        if holds_all(self._manifest, bucket, root):
            return
        taken: list[list[Tensor]] = [[] for _ in senders]
        given: list[Tensor] = []
        if root == self._sender:
            taken = [
                [] if sender == root else self._held(bucket, memory, sender) for sender in senders
            ]
        else:
            given = self._held(bucket, memory, self._sender)
        sizes = [sum(map(len, parts)) for parts in taken]
        arrived = memory.new_empty(sum(sizes))
        sent = torch.cat(given) if given else memory.new_empty(0)
        with _broken_off(f"gathering of bucket {index}"):
            work = self._group.alltoall_base(
                arrived,
                sent,
                sizes,
                [len(sent) if sender == root else 0 for sender in senders],
                AllToAllOptions(),
            )
            _finish(work, self._board)
        places = [part for parts in taken for part in parts]
        for place, part in zip(places, torch.split(arrived, [*map(len, places)]), strict=True):
            place.copy_(part)

    def _held(self, bucket: Bucket, memory: Tensor, sender: int) -> list[Tensor]:
        """Return views of the runs of a bucket that a sender holds."""
        return [memory[first:end] for first, end in runs(self._manifest, bucket, sender)]


def _finish(work: Any, board: StoreBoard) -> None:
    """Wait for `work` and watch the board: a peer that hangs breaks no connection.

    Raises:
        RuntimeError: the collective failed.
        WeightSyncError: a process stopped the transfer.
    """
    pause_s, longest_s = PAUSE_S
    look_s = time.monotonic() + SLICE_S
    while not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
        if time.monotonic() > look_s:
            board.raise_if_stopped()
            look_s = time.monotonic() + SLICE_S
    work.wait()


@contextmanager
def _broken_off(what: str) -> Iterator[None]:
    """Turn a collective's RuntimeError into a WeightSyncError.

    Args:
        what: what broke off, for the message, such as `broadcast of bucket 3`.
    """
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: {what} broke off: {first_line(error)}; another process of the "
            "transfer probably died"
        ) from error


def _join(channel: Channel, board: StoreBoard, rank: int, size: int, name: str) -> Any:
    """Return the process group once all ranks have joined.

    A thread joins the group, so that this call can watch the board. If the transfer is stopped
    because a rank never comes, the thread is left behind, still waiting.

    Args:
        name: name of the group, by which its ranks find each other.

    Raises:
        WeightSyncError: a rank did not come in time, or a process stopped the transfer.
    """
    made: Future[Any] = Future()
    device = torch.cuda.current_device() if channel.collective == "nccl" else None

    def join() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # it is that of a thread
            made.set_result(_make_group(channel, rank, size, name))
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


def _make_group(channel: Channel, rank: int, size: int, name: str) -> Any:
    """Join the transfer's own NCCL or gloo group, apart from torch's default group."""
    timeout = timedelta(seconds=channel.timeout_s)
    # The group gets its own connection to the store: while it waits for the other ranks, reads of
    # the board over the same connection would block.
    prefix = PrefixStore(name, open_store(channel, is_host=False))
    if channel.collective == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = ProcessGroupNCCL(prefix, rank, size, options)
        # The first collective connects the ranks, and waits for one that has died without an end.
        group.broadcast([_allocate(channel, 1).zero_()], BroadcastOptions())
        return group
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
