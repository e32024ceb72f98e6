"""`send` and `receive`: one push of weights, whichever way it travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from roll.weight_sync.buckets import Packer, layout, unpack, used_bytes
from roll.weight_sync.channel import Channel
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.host import HostReceiver, HostSender
from roll.weight_sync.manifest import Manifest


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a sender says after a push."""

    num_tensors: int
    num_bytes: int
    checksum: str | None
    """Of the sent tensors, when asked for."""


def send(
    channel: Channel,
    tensors: Iterator[tuple[str, Tensor]],
    manifest: Manifest,
    *,
    verify: bool,
) -> SendReport:
    """Push `tensors`, as announced by `manifest`, to all receivers of `channel`.

    Returns when every receiver uses the new weights. `tensors` is exhausted in any case: making
    the next one may be a collective that other ranks of the trainer take part in.

    Args:
        tensors: on any device, one at a time, in the order of the manifest.
        verify: compute checksums at both ends and compare them.

    Raises:
        WeightSyncError: a receiver refused the manifest (then all keep their old weights), died,
            or did not answer within `channel.timeout_s`.
    """
    try:
        return _send(channel, tensors, manifest, verify=verify)
    finally:
        for _ in tensors:
            pass


def _send(
    channel: Channel,
    tensors: Iterator[tuple[str, Tensor]],
    manifest: Manifest,
    *,
    verify: bool,
) -> SendReport:
    checksum = Checksum() if verify else None
    packer = Packer(manifest, tensors, checksum.add if checksum else _ignore)
    end = (
        BroadcastSender(channel, manifest, verify=verify)
        if channel.kind == "broadcast"
        else HostSender(channel, manifest, verify=verify)
    )
    try:
        for index, bucket in enumerate(layout(manifest, channel.bucket_bytes)):
            packer.fill(bucket, end.memory(index))
            end.publish(index, used_bytes(bucket))
        packer.finish()
        digest = checksum.hexdigest() if checksum else None
        end.finish(digest)
    except BaseException as error:
        end.stop(f"{type(error).__name__}: {error}")
        raise
    finally:
        end.close()
    return SendReport(len(manifest.tensors), manifest.num_bytes, digest)


class Incoming:
    """A push on its way in."""

    def __init__(self, end: HostReceiver | BroadcastReceiver, bucket_bytes: int) -> None:
        self.manifest = end.manifest
        self.verify = end.verify
        """The sender asks for a checksum."""
        self.checksum: str | None = None
        """Of the received tensors, once all have come in and if the sender asked for it."""
        self._end = end
        self._bucket_bytes = bucket_bytes
        self.complete = False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in its own memory, in the manifest's order. To be exhausted, once.

        Raises:
            WeightSyncError: the sender died or stopped, or the checksums differ.
        """
        checksum = Checksum() if self.verify else None
        buckets = layout(self.manifest, self._bucket_bytes)
        incoming = self._end.incoming(len(buckets))
        for name, tensor in unpack(self.manifest, buckets, incoming):
            if checksum:
                checksum.add(name, tensor)
            yield name, tensor
        expected = self._end.end()
        self.checksum = checksum.hexdigest() if checksum else None
        if self.checksum != expected:
            raise WeightSyncError(
                f"weights changed on their way: checksum {self.checksum}, sent were {expected}"
            )
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
    end = (
        BroadcastReceiver(channel, index)
        if channel.kind == "broadcast"
        else HostReceiver(channel, index)
    )
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


def _ignore(name: str, tensor: Tensor) -> None:
    """No checksum wanted."""
