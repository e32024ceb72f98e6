"""`unpack`: takes a receiver's tensors out of buckets and copies only where it must."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.push_plan import Bucket, Piece, shares_of_all
from roll.weight_sync.receive_buffer import ReceiveBuffer, empty_tensor

TargetMemory = Callable[[TensorMeta], Tensor | None]
"""Function that returns the receiver's own memory for a tensor, or None if there is none.

The memory is contiguous and of the tensor's shape and dtype."""


class Buckets(Protocol):
    """A receiver's source of buckets."""

    def take(self, index: int) -> ReceiveBuffer:
        """Wait for bucket `index` and return its memory; buckets are taken in order."""
        ...

    def give_back(self, index: int) -> None:
        """Report that bucket `index` is read, so that its memory can be used again."""
        ...


def no_target_memory(meta: TensorMeta) -> Tensor | None:
    """Return None: a `TargetMemory` of a receiver that has no memory of its own for any tensor."""
    return None


def unpack(
    manifest: Manifest,
    buckets: Sequence[Bucket],
    source: Buckets,
    into: TargetMemory,
    checksum: Checksum | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all tensors in the order of the manifest.

    A tensor lies in the memory that `into` returns. Where that is None, the tensor stays in its
    bucket if one bucket holds all of it, and gets memory of its own otherwise. The consumer must
    not write to a tensor that lies in a bucket; it may keep the tensor, which costs a copy. The
    last buckets are given back when the iterator has been read to its end.

    Args:
        manifest: all tensors of the transfer.
        buckets: which pieces of tensors each bucket holds.
        source: gives the bytes of the buckets.
        into: gives the memory for a tensor, or None.
        checksum: gets the bytes of all tensors; the caller compares it. None: there is none.

    Raises:
        WeightSyncError: memory that `into` returns does not fit its tensor, or the transfer broke
            off.
    """
    reading = _BucketReader(source)
    pieces = _by_tensor(buckets)
    for position, meta in enumerate(manifest.tensors):
        own = pieces.get(position, [])
        tensor = _assemble(reading, meta, own, into(meta))
        if checksum is not None:
            for _, piece in own:
                for _, sent in shares_of_all(manifest, piece):
                    checksum.add(meta, sent.start, _bytes_of(sent, tensor))
        yield meta.name, tensor
        del tensor
        reading.settle()
    reading.end()


def _assemble(
    reader: _BucketReader, meta: TensorMeta, own: Sequence[tuple[int, Piece]], target: Tensor | None
) -> Tensor:
    """Return a tensor with the bytes of its pieces `own`: in `target`; if that is None, in its
    bucket if one bucket holds all of it, or else in memory of its own."""
    if target is not None:
        _check_target(meta, target)
    if target is None and len({index for index, _ in own}) == 1:
        index, first = own[0]
        return reader.slot(index).view(first.offset, meta)
    device = reader.slot(own[0][0]).memory.device if own else torch.device("cpu")
    tensor = empty_tensor(meta, device) if target is None else target
    for index, piece in own:
        bucket = reader.slot(index).memory[piece.offset : piece.offset + piece.num_bytes]
        _bytes_of(piece, tensor).copy_(bucket)
    return tensor


class _BucketReader:
    """The bucket that is read, and the bucket before it while one of its tensors is in use.

    A consumer's loop holds a tensor until it gets the next one. So a bucket is given back one
    tensor late: by then its last tensor is usually free and need not be copied.
    """

    def __init__(self, source: Buckets) -> None:
        self._source = source
        self._receive_buffer: ReceiveBuffer | None = None
        self._index = -1
        self._before: int | None = None

    def slot(self, index: int) -> ReceiveBuffer:
        """Return the memory of bucket `index`, which is the current bucket or the next one."""
        if index != self._index or self._receive_buffer is None:
            self.settle()
            if self._receive_buffer is not None:
                self._before = self._index
                if not self._receive_buffer.in_use():
                    self.settle()
            self._receive_buffer = self._source.take(index)
            self._index = index
        return self._receive_buffer

    def settle(self) -> None:
        """Give back the previous bucket, if it is still held."""
        if self._before is not None:
            self._source.give_back(self._before)
            self._before = None

    def end(self) -> None:
        """Give back the buckets that are still held."""
        self.settle()
        if self._receive_buffer is not None:
            self._source.give_back(self._index)


def _by_tensor(buckets: Sequence[Bucket]) -> dict[int, list[tuple[int, Piece]]]:
    """Map each tensor's position in the manifest to its (index of the bucket, piece) pairs."""
    flat = ((index, piece) for index, bucket in enumerate(buckets) for piece in bucket)
    return {tensor: list(group) for tensor, group in groupby(flat, lambda pair: pair[1].tensor)}


def _check_target(meta: TensorMeta, tensor: Tensor) -> None:
    """Raise WeightSyncError unless the memory is contiguous, of the tensor's shape and dtype."""
    if (
        tuple(tensor.shape) != meta.shape
        or tensor.dtype != meta.torch_dtype
        or not tensor.is_contiguous()
    ):
        raise WeightSyncError(
            f"the memory prepared for {meta} is {tuple(tensor.shape)} of {tensor.dtype}; it must "
            "be contiguous and of the same shape and dtype"
        )


def _bytes_of(piece: Piece, tensor: Tensor) -> Tensor:
    """Return the bytes of a piece as a view of its whole `tensor`, uint8."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    return raw[piece.start : piece.start + piece.num_bytes]
