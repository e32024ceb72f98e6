"""`send` and `receive`: one push of weights, whichever way it travels."""

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
from roll.weight_sync.push_plan import Bucket, largest, layout
from roll.weight_sync.transports.broadcast import BroadcastReceiver, BroadcastSender
from roll.weight_sync.transports.files import FilesReceiver, FilesSender
from roll.weight_sync.transports.host_receive import HostReceiver
from roll.weight_sync.transports.host_send import HostHelper, HostLeader
from roll.weight_sync.unpack import Buckets, Into, nowhere, unpack


class SenderEnd(Protocol):
    """What a transport does for a sender."""

    def memory(self, index: int) -> Tensor:
        """Where bucket `index` is to be written, as soon as it may."""
        ...

    def publish(self, index: int, bucket: Bucket) -> None:
        """This sender's pieces of it are written."""
        ...

    def finish(self, checksum: Checksum | None) -> str | None:
        """Returns when all receivers use the new weights: the checksum of all senders."""
        ...

    def stop(self, reason: str) -> None: ...

    def close(self) -> None: ...


class ReceiverEnd(Buckets, Protocol):
    """What a transport does for a receiver."""

    manifest: Manifest
    verify: bool

    def accept(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def end(self) -> str | None: ...

    def done(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a sender says after a push."""

    num_tensors: int
    num_bytes: int
    """Of all senders together."""
    checksum: str | None
    """Of the sent tensors, when asked for; the leading sender's counts all of them."""
    gather_s: float = 0.0
    """Spent on making this sender's parts."""
    pack_s: float = 0.0
    """Spent on writing them into buckets, in the announced dtype."""
    total_s: float = 0.0
    """From the agreement on the manifest to the use of the new weights."""


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

    All senders call it, with the same manifest. Returns when every receiver uses the new weights.
    `parts` is exhausted in any case: making the next one may be a collective that other ranks of
    the trainer take part in.

    Args:
        parts: on any device, one at a time, in the order of the manifest: the elements that
            `manifest.cuts` gives to this sender, also where they are none.
        verify: compute checksums at both ends and compare them.
        sender: below `channel.num_senders`; number 0 leads.
        abort: gives the transfer up, from another thread; to be done at all senders. Receivers
            are told, also those that come late.

    Raises:
        WeightSyncError: a receiver refused the manifest (then all keep their old weights), died,
            or did not answer within `channel.timeout_s`; or the transfer was given up.
    """
    abort = abort or Abort()
    try:
        return _send(channel, parts, manifest, abort, verify=verify, sender=sender)
    except WeightSyncError:
        abort.check()  # the better message
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
    if manifest.tensors and manifest.num_senders != channel.num_senders:
        raise WeightSyncError(
            f"the manifest shares the tensors out over {manifest.num_senders} senders, the "
            f"channel has {channel.num_senders}"
        )
    checksum = Checksum() if verify else None
    packer = Packer(manifest, parts, sender, checksum)
    buckets = layout(manifest, channel.bucket_bytes)
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
    )


class Incoming:
    """A push on its way in."""

    def __init__(self, end: ReceiverEnd, bucket_bytes: int) -> None:
        self.manifest = end.manifest
        self.verify = end.verify
        """The sender asks for a checksum."""
        self.checksum: str | None = None
        """Of the received tensors, once all have come in and if the sender asked for it."""
        self.receive_s = 0.0
        """Spent in here: waiting for bytes, copying and summing them."""
        self.complete = False
        self._end = end
        self._bucket_bytes = bucket_bytes
        self._begun = time.perf_counter()

    @property
    def load_s(self) -> float:
        """Spent by the consumer up to now: before, between and after the tensors."""
        return time.perf_counter() - self._begun - self.receive_s

    def tensors(self, into: Into = nowhere) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, in the manifest's order. To be exhausted, once.

        A tensor in memory that `into` named is there when it comes out. Others must not be written
        to: they may lie in memory that the transfer goes on to use. Kept ones stay as they are.

        Raises:
            WeightSyncError: the sender died or stopped, or the checksums differ.
        """
        begun = time.perf_counter()
        checksum = Checksum() if self.verify else None
        buckets = layout(self.manifest, self._bucket_bytes)
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
    """Take part in a push as receiver `index`; leaving the block tells the sender how it went.

    Args:
        index: below `channel.num_receivers`, another one for each receiver.
        check: raises WeightSyncError to refuse; then no receiver gets any tensor.

    Raises:
        WeightSyncError: the manifest is refused here or elsewhere, or the transfer broke off. Only
            in the second case may part of the tensors have been yielded.
    """
    end = _receiver_end(channel, index)
    try:
        check(end.manifest)
        end.accept()
        incoming = Incoming(end, channel.bucket_bytes)
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
    if channel.kind == "broadcast":
        return BroadcastSender(channel, manifest, sender, size, abort, verify=verify)
    if channel.kind == "files":
        return FilesSender(channel, manifest, sender, size, abort, verify=verify)
    if sender > 0:
        return HostHelper(channel, manifest, sender, abort)
    return HostLeader(channel, manifest, size, abort, verify=verify)


def _receiver_end(channel: Channel, index: int) -> ReceiverEnd:
    if channel.kind == "broadcast":
        return BroadcastReceiver(channel, index)
    if channel.kind == "files":
        return FilesReceiver(channel, index)
    return HostReceiver(channel, index)
