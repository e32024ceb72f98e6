"""The receiver's half of a bucket: tensors out of buckets, copied only where they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.push_plan import Bucket, Piece
from roll.weight_sync.receive_buffer import ReceiveBuffer, empty_tensor

Into = Callable[[TensorMeta], Tensor | None]
"""The receiver's own memory for a tensor: contiguous, of its shape and dtype; or None."""


class Buckets(Protocol):
    """Where buckets come in."""

    def take(self, index: int) -> ReceiveBuffer:
        """Bucket `index`, once it is there; they are taken in order."""
        ...

    def give_back(self, index: int) -> None:
        """Nobody reads the bucket any more."""
        ...


def nowhere(meta: TensorMeta) -> Tensor | None:
    """The receiver has no memory prepared."""
    return None


def unpack(
    manifest: Manifest,
    buckets: Sequence[Bucket],
    source: Buckets,
    into: Into,
    checksum: Checksum | None,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors in manifest order: in the memory that `into` names, else in their bucket if they
    lie whole in one, else in memory of their own.

    A tensor in a bucket must not be written to. It is the consumer's to keep, which costs a copy.
    """
    reading = _Reading(source)
    pieces = _by_tensor(buckets)
    for position, meta in enumerate(manifest.tensors):
        own = pieces.get(position, [])
        tensor = into(meta)
        if tensor is not None:
            _check_target(meta, tensor)
        if tensor is None and len({index for index, _ in own}) == 1:
            index, first = own[0]
            tensor = reading.slot(index).view(first.offset, meta)
            raw = _bytes(tensor)
        else:
            device = reading.slot(own[0][0]).memory.device if own else torch.device("cpu")
            tensor = empty_tensor(meta, device) if tensor is None else tensor
            raw = _bytes(tensor)
            for index, piece in own:
                bucket = reading.slot(index).memory[piece.offset : piece.offset + piece.num_bytes]
                raw[piece.start : piece.start + piece.num_bytes].copy_(bucket)
        if checksum is not None:
            for _, piece in own:
                checksum.add(meta, piece.start, raw[piece.start : piece.start + piece.num_bytes])
        name, raw = meta.name, torch.empty(0)
        given, tensor = tensor, None
        yield name, given
        del given
        reading.settle()
    reading.end()


class _Reading:
    """The bucket that is read, and the one before it while a tensor of it is still in use.

    A consumer's loop holds the last tensor until it has the next one, so a bucket is given back
    one tensor later than its last: at its end nothing has to be saved.
    """

    def __init__(self, source: Buckets) -> None:
        self._source = source
        self._receive_buffer: ReceiveBuffer | None = None
        self._index = -1
        self._before: int | None = None

    def slot(self, index: int) -> ReceiveBuffer:
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
        """Give back the bucket before this one."""
        if self._before is not None:
            self._source.give_back(self._before)
            self._before = None

    def end(self) -> None:
        self.settle()
        if self._receive_buffer is not None:
            self._source.give_back(self._index)


def _by_tensor(buckets: Sequence[Bucket]) -> dict[int, list[tuple[int, Piece]]]:
    """Position of a tensor -> its pieces, each with the index of its bucket."""
    flat = ((index, piece) for index, bucket in enumerate(buckets) for piece in bucket)
    return {tensor: list(group) for tensor, group in groupby(flat, lambda pair: pair[1].tensor)}


def _check_target(meta: TensorMeta, tensor: Tensor) -> None:
    if (
        tuple(tensor.shape) != meta.shape
        or tensor.dtype != meta.torch_dtype
        or not tensor.is_contiguous()
    ):
        raise WeightSyncError(
            f"the memory prepared for {meta} is {tuple(tensor.shape)} of {tensor.dtype}; it must "
            "be contiguous and of the same shape and dtype"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
