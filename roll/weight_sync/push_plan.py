"""The plan of a push: which bytes of which tensor lie in which bucket.

The plan is pure arithmetic on the manifest. Each process computes the same plan, so it need not be
sent. A bucket is a run of bytes of bounded size. All senders fill it together, each with its own
shares of the tensors, and every receiver reads it. A tensor lies in a bucket without gaps, also
where several senders hold its parts. Three rules apply, in this order:

1. Neighbouring tensors of one module, which engines may fuse (q, k and v; gate and up), share a
   bucket if they fit in one.
2. A tensor that fits in a bucket is not split over two, so that receivers can use it in place.
3. A larger tensor continues in the next bucket.

In a `full` plan only the last rule applies, so that all buckets but the last are full: a transport
whose time depends on the number of buckets needs the fewest, and its receivers copy anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest

ALIGN = 64
"""Tensors begin at multiples of this many bytes, so that they can be used in place."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor inside one bucket."""

    tensor: int
    """Position of the tensor in the manifest."""
    start: int
    """First byte of the piece within the tensor."""
    offset: int
    """First byte of the piece within the bucket."""
    num_bytes: int


Bucket = Sequence[Piece]


def plan(manifest: Manifest, channel: Channel) -> tuple[Bucket, ...]:
    """Return the buckets of a push over this channel; see `layout`."""
    return layout(manifest, channel.bucket_bytes, full=channel.kind == "broadcast")


@lru_cache(maxsize=2)
def layout(manifest: Manifest, bucket_bytes: int, *, full: bool = False) -> tuple[Bucket, ...]:
    """Return the pieces of each bucket, in the order of the tensors.

    Tensors without bytes have no piece. The result for the latest manifests is kept, because one
    push is as the other.

    Args:
        full: fill every bucket but the last to its end.

    Raises:
        WeightSyncError: `bucket_bytes` is below `ALIGN`.
    """
    size = bucket_bytes // ALIGN * ALIGN
    if size < ALIGN:
        raise WeightSyncError(f"bucket_bytes is {bucket_bytes}; it must be at least {ALIGN}")
    sizes = [meta.num_bytes for meta in manifest.tensors]
    filling = _Filling(size)
    if full:
        for tensor, num_bytes in enumerate(sizes):
            filling.add(tensor, num_bytes)
        return tuple(filling.buckets)
    for _, group in groupby(range(len(sizes)), lambda i: module_of(manifest.tensors[i].name)):
        tensors = list(group)
        together = sum(_aligned(sizes[i]) for i in tensors)
        if filling.room < together <= size:
            filling.begin()
        for tensor in tensors:
            if filling.room < sizes[tensor] <= size:
                filling.begin()
            filling.add(tensor, sizes[tensor])
    return tuple(filling.buckets)


def used_bytes(bucket: Bucket) -> int:
    """Return the bytes up to the end of the last piece, with the gaps between pieces; the bucket
    must have a piece."""
    return bucket[-1].offset + bucket[-1].num_bytes


def share(manifest: Manifest, piece: Piece, sender: int) -> Piece | None:
    """Return the part of a piece that a sender holds; None if it holds nothing of it."""
    width = manifest.tensors[piece.tensor].torch_dtype.itemsize
    cuts = manifest.cuts_of(piece.tensor)
    start = max(piece.start, cuts[sender] * width)
    end = min(piece.start + piece.num_bytes, cuts[sender + 1] * width)
    if start >= end:
        return None
    return Piece(piece.tensor, start, piece.offset + start - piece.start, end - start)


def shares(manifest: Manifest, bucket: Bucket, sender: int) -> Iterator[Piece]:
    """Yield the parts of a bucket's pieces that a sender holds, in order."""
    for piece in bucket:
        own = share(manifest, piece, sender)
        if own is not None:
            yield own


def runs(manifest: Manifest, bucket: Bucket, sender: int) -> list[tuple[int, int]]:
    """Return the runs of bytes of a bucket that a sender holds: first byte and end of each.

    A run includes the alignment gaps between pieces that this sender holds to their ends.
    """
    found: list[tuple[int, int]] = []
    goes_on = False
    for piece in bucket:
        own = share(manifest, piece, sender)
        if own is None:
            goes_on = False
            continue
        first, end = own.offset, own.offset + own.num_bytes
        if goes_on and first == piece.offset:
            first, _ = found.pop()
        found.append((first, end))
        goes_on = end == piece.offset + piece.num_bytes
    return found


def shares_of_all(manifest: Manifest, piece: Piece) -> Iterator[tuple[int, Piece]]:
    """Yield each sender that holds a part of a piece, and that part, in order."""
    for sender in range(manifest.num_senders):
        own = share(manifest, piece, sender)
        if own is not None:
            yield sender, own


def holds_all(manifest: Manifest, bucket: Bucket, sender: int) -> bool:
    """Return True if a sender holds all pieces of a bucket."""
    return all(share(manifest, piece, sender) == piece for piece in bucket)


def broadcaster(manifest: Manifest, bucket: Bucket, index: int) -> int:
    """Return the sender that broadcasts a bucket: the senders in turn, if they hold a part of it;
    else the one that holds its first byte.

    Args:
        index: number of the bucket.
    """
    turn = index % manifest.num_senders
    if next(shares(manifest, bucket, turn), None) is not None:
        return turn
    return next(shares_of_all(manifest, bucket[0]))[0]


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

    def __init__(self, size: int) -> None:
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

    def add(self, tensor: int, num_bytes: int) -> None:
        """Append the pieces of the tensor at this position of the manifest; open a new bucket when
        one is full."""
        self._offset = _aligned(self._offset)
        start = 0
        while start < num_bytes:
            if self._offset >= self._size:
                self.buckets.append([])
                self._offset = 0
            length = min(num_bytes - start, self._size - self._offset)
            self.buckets[-1].append(Piece(tensor, start, self._offset, length))
            start += length
            self._offset += length


def _aligned(offset: int) -> int:
    """Return the lowest multiple of `ALIGN` that is not below `offset`."""
    return -(-offset // ALIGN) * ALIGN
