"""`send` and `receive`: one push of weights, over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.pack import Packer
from roll.weight_sync.push_plan import Bucket, largest, plan
from roll.weight_sync.transports.broadcast import BroadcastReceiver, BroadcastSender
from roll.weight_sync.transports.files import FilesReceiver, FilesSender
from roll.weight_sync.transports.host_receive import HostReceiver
from roll.weight_sync.transports.host_send import HostHelper, HostLeader
from roll.weight_sync.unpack import Buckets, TargetMemory, no_target_memory, unpack


class SenderEnd(Protocol):
    """A sender's end of a transport.

    Its constructor connects, announces the manifest, and returns once all processes have agreed. It
    raises WeightSyncError if a process refused, died or did not answer in time. Its argument `size`
    is the size of the fullest bucket, in bytes.
    """

    @property
    def groups_made(self) -> int:
        """Number of process groups that were made for the push, in all processes together."""
        ...

    def memory(self, index: int) -> Tensor:
        """Return the memory to write bucket `index` into, once it may be overwritten."""
        ...

    def publish(self, index: int, bucket: Bucket) -> None:
        """Send this sender's pieces of bucket `index`, which are now written."""
        ...

    def finish(self, checksum: Checksum | None) -> str | None:
        """Wait until all receivers use the new weights; return the checksum of the push.

        The leading sender returns the checksum of all pieces, another sender at least that of
        its own; None if `checksum` is None.
        """
        ...

    def stop(self, reason: str) -> None:
        """Tell the other processes why the push is given up; ignore those that are gone."""
        ...

    def close(self) -> None:
        """Free connections, memory and files, after the end of a push or its failure."""
        ...


class ReceiverEnd(Buckets, Protocol):
    """A receiver's end of a transport. Its constructor connects and waits for the manifest."""

    manifest: Manifest
    verify: bool

    def accept(self) -> None:
        """Agree to the manifest, and wait until all other processes have agreed.

        Raises:
            WeightSyncError: another process refused, or the sender gave up.
        """
        ...

    def fail(self, reason: str) -> None:
        """Tell the sender why this receiver gives up; ignore a sender that is gone."""
        ...

    def end(self) -> str | None:
        """Wait for the end of the push; return the checksum of all senders, if they made one."""
        ...

    def done(self) -> None:
        """Tell the sender that this receiver uses the new weights."""
        ...

    def close(self) -> None:
        """Free connections and memory, after the end of a push or its failure."""
        ...


@dataclass(frozen=True, slots=True)
class SendReport:
    """A sender's report about a finished push."""

    num_tensors: int
    num_bytes: int
    """Bytes of all tensors of the push, from all senders together."""
    checksum: str | None
    """Checksum of the sent tensors, or None if not asked for. The leading sender's covers all."""
    gather_s: float = 0.0
    """Time spent on making this sender's parts, in seconds."""
    pack_s: float = 0.0
    """Time spent on writing the parts into buckets, in the announced dtype, in seconds."""
    total_s: float = 0.0
    """Time from the agreement on the manifest to the use of the new weights, in seconds."""
    groups_made: int = 0
    """Number of process groups that were made for the push; 0 if all could be kept, or if the
    transport has none."""


def send(
    channel: Channel,
    parts: Iterator[tuple[str, Tensor]],
    manifest: Manifest,
    *,
    verify: bool,
    sender: int = 0,
    abort: Abort | None = None,
) -> SendReport:
    """Push this sender's `parts` of the tensors in `manifest` to all receivers of `channel`.

    All senders call this function with the same manifest. It returns when every receiver uses the
    new weights. `parts` is exhausted even after an error: making the next part may be a collective
    in which other ranks of the trainer take part.

    Args:
        parts: (name, part) of each tensor, in the order of the manifest. A part holds the elements
            that `manifest.cuts` gives to this sender, maybe none, on any device.
        verify: compute checksums at both ends and compare them.
        sender: number of this sender, below `channel.num_senders`; number 0 leads.
        abort: lets another thread give up the transfer, which must be done at all senders. All
            receivers are told, also those that connect later.

    Raises:
        WeightSyncError: a receiver refused the manifest (then all receivers keep their old
            weights), died, or did not answer within `channel.timeout_s`; or the transfer was given
            up.
    """
    abort = abort or Abort()
    try:
        return _send(channel, parts, manifest, abort, verify=verify, sender=sender)
    except WeightSyncError:
        abort.check()  # its message names the cause
        raise
    finally:
        for _ in parts:
            pass


def _send(
    channel: Channel,
    parts: Iterator[tuple[str, Tensor]],
    manifest: Manifest,
    abort: Abort,
    *,
    verify: bool,
    sender: int,
) -> SendReport:
    """Do what `send` does, up to the first error, without exhausting `parts`."""
    if manifest.tensors and manifest.num_senders != channel.num_senders:
        raise WeightSyncError(
            f"the manifest shares the tensors out over {manifest.num_senders} senders, the "
            f"channel has {channel.num_senders}"
        )
    checksum = Checksum() if verify else None
    packer = Packer(manifest, parts, sender, checksum)
    buckets = plan(manifest, channel)
    end = _sender_end(channel, manifest, sender, largest(buckets), abort, verify=verify)
    begun = time.perf_counter()
    try:
        for index, bucket in enumerate(buckets):
            packer.fill(bucket, end.memory(index))
            end.publish(index, bucket)
        packer.finish()
        total = end.finish(checksum)
    except BaseException as error:
        end.stop(abort.reason or f"{type(error).__name__}: {error}")
        raise
    finally:
        end.close()
    return SendReport(
        len(manifest.tensors),
        manifest.num_bytes,
        total,
        packer.gather_s,
        packer.pack_s,
        time.perf_counter() - begun,
        end.groups_made,
    )


class Incoming:
    """A push that a receiver is taking in.

    Args:
        channel: channel of the push, from which the plan of the buckets follows.
    """

    def __init__(self, end: ReceiverEnd, channel: Channel) -> None:
        self.manifest = end.manifest
        self.verify = end.verify
        """True if the sender asks for checksums."""
        self.checksum: str | None = None
        """Checksum of the received tensors, known at the end and if the sender asked for it."""
        self.receive_s = 0.0
        """Time spent on waiting for bytes, copying them and computing checksums, in seconds."""
        self.complete = False
        self._end = end
        self._channel = channel
        self._begun = time.perf_counter()

    @property
    def load_s(self) -> float:
        """Seconds that the block of `receive` has used by itself so far, for example for loading.

        That is all time outside of `receive_s`: before the first tensor, between the tensors, and
        after the last one.
        """
        return time.perf_counter() - self._begun - self.receive_s

    def tensors(self, into: TargetMemory = no_target_memory) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the order of the manifest. Call this once and exhaust it.

        A tensor for which `into` returns memory lies there, complete when it is yielded. The
        consumer must not write to any other tensor: its memory may belong to the transfer. A
        tensor that the consumer keeps does not change.

        Raises:
            WeightSyncError: the sender died or stopped the transfer, or the checksums differ.
        """
        begun = time.perf_counter()
        checksum = Checksum() if self.verify else None
        buckets = plan(self.manifest, self._channel)
        for item in unpack(self.manifest, buckets, self._end, into, checksum):
            self.receive_s += time.perf_counter() - begun
            yield item
            del item
            begun = time.perf_counter()
        expected = self._end.end()
        self.checksum = checksum.hexdigest() if checksum else None
        if self.checksum != expected:
            raise WeightSyncError(
                f"weights changed on their way: checksum {self.checksum}, sent were {expected}"
            )
        self.receive_s += time.perf_counter() - begun
        self.complete = True


@contextmanager
def receive(
    channel: Channel, index: int, *, check: Callable[[Manifest], None]
) -> Iterator[Incoming]:
    """Take part in a push as receiver `index`; the end of the block tells the sender the outcome.

    Args:
        index: number of this receiver, below `channel.num_receivers`; each receiver has its own.
        check: raises WeightSyncError to refuse the manifest; then no receiver gets any tensor.

    Raises:
        WeightSyncError: this or another process refused the manifest, the transfer broke off, or
            the block ended before the last tensor. Unless the manifest was refused, some tensors
            may have been yielded.
    """
    end = _receiver_end(channel, index)
    try:
        check(end.manifest)
        end.accept()
        incoming = Incoming(end, channel)
        yield incoming
        if not incoming.complete:
            raise WeightSyncError(f"receiver {index} left the push before its last tensor")
        end.done()
    except BaseException as error:
        end.fail(str(error))
        raise
    finally:
        end.close()


def _sender_end(
    channel: Channel, manifest: Manifest, sender: int, size: int, abort: Abort, *, verify: bool
) -> SenderEnd:
    """Make the end of sender number `sender`; return once all processes have agreed.

    Args:
        size: size of the fullest bucket, in bytes.

    Raises:
        WeightSyncError: see `SenderEnd`.
    """
    if channel.kind == "broadcast":
        return BroadcastSender(channel, manifest, sender, size, abort, verify=verify)
    if channel.kind == "files":
        return FilesSender(channel, manifest, sender, size, abort, verify=verify)
    if sender > 0:
        return HostHelper(channel, manifest, sender, abort)
    return HostLeader(channel, manifest, size, abort, verify=verify)


def _receiver_end(channel: Channel, index: int) -> ReceiverEnd:
    """Make the end of receiver number `index`, and wait for the manifest.

    Raises:
        WeightSyncError: no sender came within the time limit, or the sender gave up.
    """
    if channel.kind == "broadcast":
        return BroadcastReceiver(channel, index)
    if channel.kind == "files":
        return FilesReceiver(channel, index)
    return HostReceiver(channel, index)
