"""A checksum of the pieces of a push that does not depend on their order.

Every sender adds up the pieces it sends, a receiver all it has; the sums are equal when every byte
of every tensor is where it belongs. A piece counts with its CRC-32: three to four times as fast as
a cryptographic hash, and what is looked for are mistakes, not forgeries.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

from torch import Tensor

from roll.weight_sync.manifest import TensorMeta

_BITS = 128


class Checksum:
    """Adds up one digest per piece (tensor's name, shape, dtype; place; bytes) while streaming."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, meta: TensorMeta, start: int, raw: Tensor) -> None:
        """Count the bytes `raw` (uint8, any device) that begin at byte `start` of a tensor."""
        data: Any = raw.cpu().numpy()  # numpy's stubs do not call it a buffer
        fact = (meta.name, meta.shape, meta.dtype, start, len(raw), zlib.crc32(data))
        digest = hashlib.blake2b(repr(fact).encode(), digest_size=_BITS // 8).digest()
        self._add(int.from_bytes(digest, "big"))

    def merge(self, hexdigest: str) -> None:
        """Count what another checksum counted."""
        self._add(int(hexdigest, 16))

    def hexdigest(self) -> str:
        return f"{self._sum:0{_BITS // 4}x}"

    def _add(self, value: int) -> None:
        self._sum = (self._sum + value) % (1 << _BITS)
