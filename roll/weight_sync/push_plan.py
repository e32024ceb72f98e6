"""The plan of a push: which bytes of which tensor go from which sender in which bucket.

The plan is pure arithmetic on the manifest. Each process computes the same plan, so it need not be
sent. A bucket is a run of bytes of bounded size. All senders fill it together, each with its own
parts of the tensors, and every receiver reads it. A tensor lies in a bucket without gaps, also
where several senders hold its parts. Three rules apply, in this order:

1. Neighbouring tensors of one module, which engines may fuse (q, k and v; gate and up), share a
   bucket if they fit in one.
2. A tensor that fits in a bucket is not split over two, so that receivers can use it in place.
3. A larger tensor continues in the next bucket.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest

ALIGN = 64
"""Tensors begin at multiples of this many bytes, so that they can be used in place."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor, held by one sender, inside one bucket."""

    tensor: int
    """Position of the tensor in the manifest."""
    start: int
    """First byte of the piece within the tensor."""
    offset: int
    """First byte of the piece within the bucket."""
    num_bytes: int
    sender: int


Bucket = Sequence[Piece]


def layout(manifest: Manifest, bucket_bytes: int) -> list[list[Piece]]:
    """Return the pieces of each bucket, in the order of the tensors.

    Tensors without bytes have no piece.

    Raises:
        WeightSyncError: `bucket_bytes` is below `ALIGN`.
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
    """Return the bytes up to the end of the last piece, with the gaps between pieces; the bucket
    must have a piece."""
    return bucket[-1].offset + bucket[-1].num_bytes


def sender_runs(bucket: Bucket) -> list[tuple[int, int, int]]:
    """Split a bucket into runs of one sender: (sender, first byte, end) of each.

    A run includes the alignment gaps between its pieces; `end` is the byte after the last one.
    """
    runs = []
    for sender, group in groupby(bucket, lambda piece: piece.sender):
        pieces = list(group)
        runs.append((sender, pieces[0].offset, pieces[-1].offset + pieces[-1].num_bytes))
    return runs


def largest(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of the fullest bucket, at least 1: empty memory cannot be shared."""
    return max((used_bytes(bucket) for bucket in buckets), default=1)


def module_of(name: str) -> str:
    """Return the name of the module in which engines may fuse the tensor `name` with others.

    It is `model.layers.0.mlp` for `model.layers.0.mlp.up_proj.weight`, and
    `model.layers.0.mlp.experts` for the tensors of all experts of a layer. An embedding, or a norm
    outside of attention and MLP, is a module by itself.
    """
    parent = name.split(".")[:-1]
    if "experts" in parent:
        return ".".join(parent[: parent.index("experts") + 1])
    outer = parent[:-1]
    alone = len(outer) <= 1 or outer[-1].isdigit()
    return ".".join(parent if alone else outer)


def unsent_frozen_tensors(manifest: Manifest, frozen: Set[str]) -> frozenset[str]:
    """Return those `frozen` tensors that need not be sent: in their module, no tensor changes.

    A frozen tensor in a module with changing tensors is sent: engines load the tensors they fuse
    together.
    """
    moving = {module_of(m.name) for m in manifest.tensors if m.name not in frozen}
    return frozenset(
        m.name for m in manifest.tensors if m.name in frozen and module_of(m.name) not in moving
    )


class _Filling:
    """Buckets while the plan is computed.

    Args:
        size: largest size of a bucket in bytes, a multiple of `ALIGN`.
    """

    def __init__(self, manifest: Manifest, size: int) -> None:
        self._manifest = manifest
        self._size = size
        self._offset = size
        self.buckets: list[list[Piece]] = []

    @property
    def room(self) -> int:
        """Number of bytes that are left in the current bucket; 0 before the first."""
        return self._size - _aligned(self._offset)

    def begin(self) -> None:
        """Make the next piece begin a new bucket; the rest of the current one stays empty."""
        self._offset = self._size

    def add(self, tensor: int) -> None:
        """Append the pieces of the tensor at this position of the manifest; open buckets as
        needed."""
        width = self._manifest.tensors[tensor].torch_dtype.itemsize
        self._offset = _aligned(self._offset)
        for sender, (first, end) in enumerate(pairwise(self._manifest.cuts_of(tensor))):
            self._add_part(tensor, sender, first * width, end * width)

    def _add_part(self, tensor: int, sender: int, start: int, end: int) -> None:
        """Add bytes `start` to `end` of a tensor as pieces; open a new bucket when one is full."""
        while start < end:
            if self._offset >= self._size:
                self.buckets.append([])
                self._offset = 0
            num_bytes = min(end - start, self._size - self._offset)
            self.buckets[-1].append(Piece(tensor, start, self._offset, num_bytes, sender))
            start += num_bytes
            self._offset += num_bytes


def _aligned(offset: int) -> int:
    """Return the lowest multiple of `ALIGN` that is not below `offset`."""
    return -(-offset // ALIGN) * ALIGN
