"""The sender's half of a bucket: its parts of the tensors, written where the plan says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, TensorMeta, meta_of
from roll.weight_sync.push_plan import Bucket


class Packer:
    """Writes one sender's parts bucket by bucket into memory the transport hands out.

    A part may have another floating dtype than announced: it is converted on the way, so that a
    float32 master needs no bfloat16 copy.

    Args:
        parts: the sender's elements of each tensor, in the order of the manifest; also of those
            that it holds no element of. Making one may take time, or be a collective.

    Raises:
        WeightSyncError: a part differs from what the manifest announced, or one is missing or too
            many.
    """

    def __init__(
        self,
        manifest: Manifest,
        parts: Iterator[tuple[str, Tensor]],
        sender: int,
        checksum: Checksum | None,
    ) -> None:
        self._manifest = manifest
        self._parts = parts
        self._sender = sender
        self._checksum = checksum
        self._next = 0
        self._elements = torch.empty(0)
        self.gather_s = 0.0
        """Spent on making parts."""
        self.pack_s = 0.0
        """Spent on writing them into buckets."""

    def fill(self, bucket: Bucket, memory: Tensor) -> None:
        """Write this sender's pieces of `bucket` into the uint8 tensor `memory`."""
        for piece in bucket:
            # Also for the others' pieces: making a part may be a collective that they wait in,
            # and this sender would otherwise go on to a bucket that is never asked for.
            while self._next <= piece.tensor:
                self._advance()
            if piece.sender != self._sender:
                continue
            begun = time.perf_counter()
            meta = self._manifest.tensors[piece.tensor]
            width = meta.torch_dtype.itemsize
            first = piece.start // width - self._manifest.cuts_of(piece.tensor)[self._sender]
            target = memory[piece.offset : piece.offset + piece.num_bytes]
            source = self._elements[first : first + piece.num_bytes // width]
            target.view(meta.torch_dtype).copy_(source)
            self.pack_s += time.perf_counter() - begun
            if self._checksum is not None:
                self._checksum.add(meta, piece.start, target)

    def finish(self) -> None:
        """Take the tensors without bytes at the end, and make sure that nothing is left over."""
        while self._next < len(self._manifest.tensors):
            self._advance()
        self._elements = torch.empty(0)
        for name, _ in self._parts:
            raise WeightSyncError(f"tensor {name!r} was sent but not announced in the manifest")

    def _advance(self) -> None:
        self._elements = torch.empty(0)  # the last part may go before the next one is made
        expected = self._manifest.tensors[self._next]
        begun = time.perf_counter()
        name, part = next(self._parts, (None, None))
        self.gather_s += time.perf_counter() - begun
        if name is None or part is None:
            raise WeightSyncError(f"tensor {expected.name!r} was announced but not sent")
        cuts = self._manifest.cuts_of(self._next)
        num_elements = cuts[self._sender + 1] - cuts[self._sender]
        if not _fits(expected, name, part, num_elements):
            raise WeightSyncError(
                f"the manifest announced {num_elements} elements of {expected} from sender "
                f"{self._sender}, but {meta_of(name, part)} was sent"
            )
        self._elements = part.detach().reshape(-1)
        self._next += 1


def _fits(expected: TensorMeta, name: str, part: Tensor, num_elements: int) -> bool:
    whole = num_elements == expected.num_elements
    return (
        name == expected.name
        and part.numel() == num_elements
        and (not whole or tuple(part.shape) == expected.shape)
        and (
            part.dtype == expected.torch_dtype
            or (part.is_floating_point() and expected.torch_dtype.is_floating_point)
        )
    )
