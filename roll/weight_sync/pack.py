"""`Packer`: writes a sender's parts of the tensors into buckets, as the push plan says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, TensorMeta, meta_of
from roll.weight_sync.push_plan import Bucket, share


class Packer:
    """Writer of one sender's parts, bucket by bucket, into memory that the transport provides.

    A part may have another floating-point dtype than announced. It is converted when it is written,
    so that float32 master weights need no bfloat16 copy.

    Args:
        parts: (name, part) of each tensor in the order of the manifest. A part is the sender's
            elements of the tensor, and empty where it holds none. Making a part may take time, or
            be a collective.
        sender: number of the sender.
        checksum: gets each piece that is written; None: no checksum is made.

    Raises:
        WeightSyncError: a part differs from the manifest, is missing, or is not in the manifest.
            The methods raise it, not the constructor.
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
        """Time spent on making parts, in seconds."""
        self.pack_s = 0.0
        """Time spent on writing parts into buckets, in seconds."""

    def fill(self, bucket: Bucket, memory: Tensor) -> None:
        """Write this sender's shares of `bucket` into the uint8 tensor `memory`."""
        for piece in bucket:
            # Parts are made even where this sender has no share: making one may be a collective in
            # which the others wait for this sender.
            while self._next <= piece.tensor:
                self._advance()
            own = share(self._manifest, piece, self._sender)
            if own is None:
                continue
            begun = time.perf_counter()
            meta = self._manifest.tensors[own.tensor]
            width = meta.torch_dtype.itemsize
            first = own.start // width - self._manifest.cuts_of(own.tensor)[self._sender]
            target = memory[own.offset : own.offset + own.num_bytes]
            source = self._elements[first : first + own.num_bytes // width]
            target.view(meta.torch_dtype).copy_(source)
            self.pack_s += time.perf_counter() - begun
            if self._checksum is not None:
                self._checksum.add(meta, own.start, target)

    def finish(self) -> None:
        """Take the remaining parts, which have no bytes, and check that there are no further ones.

        Raises:
            WeightSyncError: a part differs from the manifest, is missing, or is not in it.
        """
        while self._next < len(self._manifest.tensors):
            self._advance()
        self._elements = torch.empty(0)
        for name, _ in self._parts:
            raise WeightSyncError(f"tensor {name!r} was sent but not announced in the manifest")

    def _advance(self) -> None:
        """Take the sender's part of the next tensor; WeightSyncError: it is not as announced."""
        self._elements = torch.empty(0)  # frees the previous part before the next one is made
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
    """Return True if a part has the announced name and size; floating-point dtypes may differ."""
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
