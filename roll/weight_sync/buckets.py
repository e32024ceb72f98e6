"""Cuts a push into buckets; both sides compute the same layout from the manifest.

A bucket is a stretch of bytes of bounded size. Small tensors share one; a tensor larger than what
is left of a bucket goes on in the next. At most two buckets exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest, TensorMeta, meta_of

_ALIGN = 16
"""Tensors begin at multiples of this, so that copies are aligned for every dtype."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor inside one bucket."""

    tensor: int
    """Position in the manifest."""
    start: int
    """First byte within the tensor."""
    offset: int
    """First byte within the bucket."""
    num_bytes: int


def layout(manifest: Manifest, bucket_bytes: int) -> list[list[Piece]]:
    """The pieces of each bucket, in order. Tensors without bytes have no piece."""
    if bucket_bytes < 1:
        raise WeightSyncError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    buckets: list[list[Piece]] = []
    offset = bucket_bytes
    for index, meta in enumerate(manifest.tensors):
        offset = -(-offset // _ALIGN) * _ALIGN
        start = 0
        while start < meta.num_bytes:
            if offset >= bucket_bytes:
                buckets.append([])
                offset = 0
            num_bytes = min(meta.num_bytes - start, bucket_bytes - offset)
            buckets[-1].append(Piece(index, start, offset, num_bytes))
            start += num_bytes
            offset += num_bytes
    return buckets


def used_bytes(bucket: list[Piece]) -> int:
    return bucket[-1].offset + bucket[-1].num_bytes


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as flat uint8, without a copy where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Packer:
    """Writes the sender's tensors bucket by bucket into memory the transport hands out.

    Raises:
        WeightSyncError: a tensor differs from what the manifest announced, or one is missing or
            too many.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensors: Iterator[tuple[str, Tensor]],
        seen: Callable[[str, Tensor], None],
    ) -> None:
        self._manifest = manifest
        self._tensors = tensors
        self._seen = seen
        self._next = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: list[Piece], memory: Tensor) -> None:
        """Copy the pieces of `bucket` into the uint8 tensor `memory`."""
        for piece in bucket:
            while self._next <= piece.tensor:
                self._advance()
            source = self._bytes[piece.start : piece.start + piece.num_bytes]
            memory[piece.offset : piece.offset + piece.num_bytes].copy_(source)

    def finish(self) -> None:
        """Take the tensors without bytes at the end, and make sure that nothing is left over."""
        while self._next < len(self._manifest.tensors):
            self._advance()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        for name, _ in self._tensors:
            raise WeightSyncError(f"tensor {name!r} was sent but not announced in the manifest")

    def _advance(self) -> None:
        expected = self._manifest.tensors[self._next]
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"tensor {expected.name!r} was announced but not sent")
        found = meta_of(name, tensor)
        if found != expected:
            raise WeightSyncError(f"the manifest announced {expected}, but {found} was sent")
        self._seen(name, tensor)
        self._bytes = byte_view(tensor)
        self._next += 1


def unpack(
    manifest: Manifest,
    buckets: list[list[Piece]],
    incoming: Iterator[Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of their own memory, in manifest order, out of uint8 buckets as they come in.

    `incoming` yields one bucket's memory each time; it is read before the next one is asked for.
    """
    pieces = ((piece, i) for i, bucket in enumerate(buckets) for piece in bucket)
    at, memory = -1, torch.empty(0, dtype=torch.uint8)
    for meta in manifest.tensors:
        raw: Tensor | None = None
        filled = 0
        while filled < meta.num_bytes:
            piece, index = next(pieces)
            while at < index:
                memory = next(incoming)
                at += 1
            if raw is None:
                raw = torch.empty(meta.num_bytes, dtype=torch.uint8, device=memory.device)
            source = memory[piece.offset : piece.offset + piece.num_bytes]
            raw[piece.start : piece.start + piece.num_bytes].copy_(source)
            filled += piece.num_bytes
        yield meta.name, _typed(meta, raw)
    for _ in incoming:
        raise WeightSyncError("a bucket came after the last tensor; both sides disagree")


def _typed(meta: TensorMeta, raw: Tensor | None) -> Tensor:
    if raw is None:
        return torch.empty(meta.shape, dtype=meta.torch_dtype)
    return raw.view(meta.torch_dtype).reshape(meta.shape)
