"""`Checksum`: a checksum of the pieces of a push that does not depend on their order.

Every sender adds up the pieces it sends, and a receiver all the pieces it has. The sums are equal
when every byte of every tensor is where it belongs. The bytes of a piece enter by their CRC-32. It
is three to four times as fast as a cryptographic hash and enough to find mistakes; it does not
protect against forgery.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

from torch import Tensor

from roll.weight_sync.manifest import TensorMeta

_BITS = 128


class Checksum:
    """Sum of one digest per piece, modulo 2^128.

    A digest covers the tensor's name, shape and dtype, the place of the piece in the tensor, and
    the bytes of the piece.
    """

    def __init__(self) -> None:
        self._sum = 0

    def add(self, meta: TensorMeta, start: int, raw: Tensor) -> None:
        """Add the piece with bytes `raw` (uint8, any device) that begins at byte `start`."""
        data: Any = raw.cpu().numpy()  # numpy's stubs do not declare it a buffer
        fact = (meta.name, meta.shape, meta.dtype, start, len(raw), zlib.crc32(data))
        digest = hashlib.blake2b(repr(fact).encode(), digest_size=_BITS // 8).digest()
        self._add(int.from_bytes(digest, "big"))

    def merge(self, hexdigest: str) -> None:
        """Add the pieces of another checksum, given as its `hexdigest`."""
        self._add(int(hexdigest, 16))

    def hexdigest(self) -> str:
        """Return the sum so far, as 32 hexadecimal digits."""
        return f"{self._sum:0{_BITS // 4}x}"

    def _add(self, value: int) -> None:
        self._sum = (self._sum + value) % (1 << _BITS)
