"""A checksum of named tensors that does not depend on their order."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from roll.weight_sync.buckets import byte_view
from roll.weight_sync.manifest import meta_of

_BITS = 128


class Checksum:
    """Adds up one digest per tensor (name, shape, dtype, bytes), so it can run while streaming."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Count a tensor on any device; each name once."""
        meta = meta_of(name, tensor)
        digest = hashlib.blake2b(repr((name, meta.shape, meta.dtype)).encode(), digest_size=16)
        buffer: Any = byte_view(tensor.cpu()).numpy()  # numpy's stubs do not call it a buffer
        digest.update(buffer)
        self._sum = (self._sum + int.from_bytes(digest.digest(), "big")) % (1 << _BITS)

    def hexdigest(self) -> str:
        return f"{self._sum:032x}"
