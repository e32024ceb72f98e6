"""The plan of a push: which bytes of which tensor go from which sender in which bucket.

Pure arithmetic on the manifest, so that all sides compute the same plan and none has to be sent.
Every receiver reads every bucket. A bucket is a stretch of bytes of bounded size that all senders
fill together, each with the part of the tensors that it holds; a tensor lies in it without gaps,
whoever holds its parts. Three rules, in this order:

1. Neighbours of one module, which engines may fuse (q, k and v; gate and up), share a bucket when
   they fit in one.
2. A tensor that fits in a bucket lies whole in one: receivers use it where it is.
3. A larger tensor goes on in the next bucket.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest

ALIGN = 64
"""Tensors begin at multiples of this, so that they can be used where they are."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor, held by one sender, inside one bucket."""

    tensor: int
    """Position in the manifest."""
    start: int
    """First byte within the tensor."""
    offset: int
    """First byte within the bucket."""
    num_bytes: int
    sender: int


Bucket = Sequence[Piece]


def layout(manifest: Manifest, bucket_bytes: int) -> list[list[Piece]]:
    """The pieces of each bucket, in order of tensors. Tensors without bytes have no piece.

    Raises:
        WeightSyncError: `bucket_bytes` is too small to be aligned.
    """
    size = bucket_bytes // ALIGN * ALIGN
    if size < ALIGN:
        raise WeightSyncError(f"bucket_bytes is {bucket_bytes}; it must be at least {ALIGN}")
    filling = _Filling(manifest, size)
    for _, group in groupby(
        range(len(manifest.tensors)), lambda i: module_of(manifest.tensors[i].name)
    ):
        tensors = [i for i in group if manifest.tensors[i].num_bytes]
        together = sum(_aligned(manifest.tensors[i].num_bytes) for i in tensors)
        if filling.room < together <= size:
            filling.begin()
        for tensor in tensors:
            if filling.room < manifest.tensors[tensor].num_bytes <= size:
                filling.begin()
            filling.add(tensor)
    return filling.buckets


def used_bytes(bucket: Bucket) -> int:
    return bucket[-1].offset + bucket[-1].num_bytes


def stretches(bucket: Bucket) -> list[tuple[int, int, int]]:
    """(sender, first byte, end) of the runs that one sender holds, gaps within them included."""
    runs = []
    for sender, group in groupby(bucket, lambda piece: piece.sender):
        pieces = list(group)
        runs.append((sender, pieces[0].offset, pieces[-1].offset + pieces[-1].num_bytes))
    return runs


def largest(buckets: Sequence[Bucket]) -> int:
    """Bytes of the fullest bucket; at least 1, so that there is memory to share."""
    return max((used_bytes(bucket) for bucket in buckets), default=1)


def module_of(name: str) -> str:
    """The part of a layer whose tensors engines may fuse: `model.layers.0.mlp` of its
    `up_proj.weight`, `model.layers.0.mlp.experts` of all of them, and a norm or an embedding by
    itself."""
    parent = name.split(".")[:-1]
    if "experts" in parent:
        return ".".join(parent[: parent.index("experts") + 1])
    outer = parent[:-1]
    alone = len(outer) <= 1 or outer[-1].isdigit()
    return ".".join(parent if alone else outer)


def may_stay_away(manifest: Manifest, frozen: Set[str]) -> frozenset[str]:
    """Those of the `frozen` tensors that a receiver can do without, because nothing of their
    module changes: engines load what they fuse as a whole."""
    moving = {module_of(m.name) for m in manifest.tensors if m.name not in frozen}
    return frozenset(
        m.name for m in manifest.tensors if m.name in frozen and module_of(m.name) not in moving
    )


class _Filling:
    """Buckets in the making."""

    def __init__(self, manifest: Manifest, size: int) -> None:
        self._manifest = manifest
        self._size = size
        self._offset = size
        self.buckets: list[list[Piece]] = []

    @property
    def room(self) -> int:
        return self._size - _aligned(self._offset)

    def begin(self) -> None:
        """Leave what is left of this bucket empty."""
        self._offset = self._size

    def add(self, tensor: int) -> None:
        width = self._manifest.tensors[tensor].torch_dtype.itemsize
        self._offset = _aligned(self._offset)
        for sender, (first, end) in enumerate(pairwise(self._manifest.cuts_of(tensor))):
            self._add_part(tensor, sender, first * width, end * width)

    def _add_part(self, tensor: int, sender: int, start: int, end: int) -> None:
        while start < end:
            if self._offset >= self._size:
                self.buckets.append([])
                self._offset = 0
            num_bytes = min(end - start, self._size - self._offset)
            self.buckets[-1].append(Piece(tensor, start, self._offset, num_bytes, sender))
            start += num_bytes
            self._offset += num_bytes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
