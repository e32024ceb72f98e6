"""A transfer across hosts: collective broadcasts in a process group of the transfer's own.

Each bucket is one broadcast. Where several senders hold shares of it, one of them gathers these
first; the senders take turns. So the number of broadcasts is that of the buckets, whatever the
number of tensors and senders. A TCPStore on the leading sender's host is the notice board and then
the rendezvous of groups that are made; `kept_groups` says which stay for later pushes. The
process's default group is not used: in a sender it usually belongs to the trainer, in a receiver to
the engine.

While one bucket is read, the next one travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, BroadcastOptions

from roll.core.errors import failure
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
from roll.weight_sync.transports.kept_groups import PushGroups
from roll.weight_sync.transports.process_groups import allocate, broken_off, finish_work
from roll.weight_sync.transports.store_board import StoreBoard


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
        """Connect and agree as `SenderEnd` says, and return once all processes have joined the
        groups that are made for this push."""
        self._board = StoreBoard(channel, sender_name(sender), is_host=sender == 0)
        self._group: _Group | None = None
        self._gathering: _Gathering | None = None
        abort.when_given_up(self._board.give_up)
        self._others = [
            *(sender_name(i) for i in range(1, channel.num_senders)),
            *(receiver_name(i) for i in range(channel.num_receivers)),
        ]
        self._whole = False
        self._groups = PushGroups(channel, self._board, sender_name(sender))
        try:
            if sender > 0:
                self._groups.announce()
            self._notes = SenderNotes(self._board, channel, manifest, sender, verify=verify)
            self._groups.agree(self._others if sender == 0 else None)
            self._buckets = [allocate(channel, size), allocate(channel, size)]
            self._group = _Group(channel, self._board, manifest, self._groups.enter(sender))
            if channel.num_senders > 1:
                group = self._groups.enter(sender, of_senders=True)
                self._gathering = _Gathering(channel, self._board, manifest, sender, group)
        except Exception as error:
            self._board.give_up(failure(error))
            self.close()
            raise

    @property
    def groups_made(self) -> int:
        return self._groups.made

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
        self._notes.wait_received()
        total = self._notes.finish(checksum)
        self._whole = True
        return total

    def stop(self, reason: str) -> None:
        self._notes.stop(reason)

    def close(self) -> None:
        """Keep the groups if the push has ended well, else break their connections now.

        An error's traceback may keep this object alive, and the others would then wait for its
        next bucket. After a stopped push the notice board stays, for processes that come late.
        """
        self._groups.end(whole=self._whole)
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
        self._whole = False
        self._groups = PushGroups(channel, self._board, receiver_name(index))
        self._notes = ReceiverNotes(self._board, index)
        self.manifest = self._notes.manifest
        self.verify = self._notes.verify
        self._plan: Sequence[Bucket] = ()

    def accept(self) -> None:
        """Agree as `ReceiverEnd.accept` does, enter the group, start to receive two buckets."""
        channel = self._channel
        self._groups.announce()
        self._notes.accept()
        self._groups.agree()
        self._plan = plan(self.manifest, channel)
        size = largest(self._plan)
        self._slots = (_receive_buffer(channel, size), _receive_buffer(channel, size))
        group = self._groups.enter(channel.num_senders + self._index)
        self._group = _Group(channel, self._board, self.manifest, group)
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
        """Return what the sender says at the end, once every receiver has all bytes.

        Receivers pass the bytes on to each other. NCCL ends a broadcast in a receiver before the
        next one has its bytes, and drops those that are on their way when the group is left.
        """
        self._notes.received()
        return self._notes.end()

    def done(self) -> None:
        self._notes.done()
        self._whole = True

    def close(self) -> None:
        """Keep the group if the push has ended well, else break its connections now, so that the
        other processes notice."""
        self._groups.end(whole=self._whole)
        self._group = None

    def _begin(self, index: int) -> None:
        """Start to receive bucket `index` into the memory of bucket `index - 2`, which must be
        free."""
        assert self._group is not None
        self._group.begin(index, self._plan[index], self._slots[index % 2].memory)


class _Group:
    """The broadcasts of a transfer, in the process group of all its ends.

    Args:
        group: PyTorch's group. The senders have the first ranks, by number; the receivers follow.
    """

    def __init__(self, channel: Channel, board: StoreBoard, manifest: Manifest, group: Any) -> None:
        self._manifest = manifest
        self._works: dict[int, Any] = {}
        self._board = board
        self._timeout_s = channel.timeout_s
        self._group = group

    def begin(self, index: int, bucket: Bucket, memory: Tensor) -> None:
        """Start the broadcast of bucket `index`, which every rank must start in the same order."""
        options = BroadcastOptions()
        options.rootRank = broadcaster(self._manifest, bucket, index)
        options.asyncOp = True
        with broken_off(f"broadcast of bucket {index}"):
            self._works[index] = self._group.broadcast([memory[: used_bytes(bucket)]], options)

    def wait(self, index: int) -> None:
        """Wait for the broadcast of bucket `index`; return at once if it was not started."""
        if index in self._works:
            with broken_off(f"broadcast of bucket {index}"):
                finish_work(self._works.pop(index), self._board, self._timeout_s)

    def wait_all(self) -> None:
        """Wait for all broadcasts that were started."""
        for index in sorted(self._works):
            self.wait(index)


class _Gathering:
    """The exchanges in the process group of the senders, by which one of them gathers the shares of
    a bucket.

    Args:
        group: PyTorch's group.
    """

    def __init__(
        self, channel: Channel, board: StoreBoard, manifest: Manifest, sender: int, group: Any
    ) -> None:
        self._manifest = manifest
        self._sender = sender
        self._board = board
        self._timeout_s = channel.timeout_s
        self._group = group

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
        with broken_off(f"gathering of bucket {index}"):
            work = self._group.alltoall_base(
                arrived,
                sent,
                sizes,
                [len(sent) if sender == root else 0 for sender in senders],
                AllToAllOptions(),
            )
            finish_work(work, self._board, self._timeout_s)
        places = [part for parts in taken for part in parts]
        for place, part in zip(places, torch.split(arrived, [*map(len, places)]), strict=True):
            place.copy_(part)

    def _held(self, bucket: Bucket, memory: Tensor, sender: int) -> list[Tensor]:
        """Return views of the runs of a bucket that a sender holds."""
        return [memory[first:end] for first, end in runs(self._manifest, bucket, sender)]


def _receive_buffer(channel: Channel, num_bytes: int) -> ReceiveBuffer:
    """Return a buffer for a bucket in the kind of memory that `allocate` returns."""
    if channel.collective == "nccl":
        return DeviceBuffer(allocate(channel, num_bytes))
    return PrivateBuffer(num_bytes)
