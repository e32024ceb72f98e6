"""Cases as data sets pack them: JSON in text, perhaps compressed and in base64, perhaps twice."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from typing import Any, NoReturn

_BASE64 = re.compile(rb"[A-Za-z0-9+/\-_\s]+={0,2}\s*")
_MOST_UNPACKED = 2**30
"""Bytes that cases may have when they are unpacked."""
_LAYERS = 6
_ZLIB, _GZIP, _PICKLE = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), b"\x1f\x8b", b"\x80"


def unpack(packed: Any) -> Any:
    """Return the value that text or bytes hold; any other value is returned as it is.

    Takes away, layer by layer, JSON, base64, zlib or gzip, and a pickle of a plain text, as
    LiveCodeBench has it.

    Raises:
        ValueError: there is no such value.
    """
    value = packed
    for _ in range(_LAYERS):
        if not isinstance(value, str | bytes):
            return value
        value = _without_layer(value.encode() if isinstance(value, str) else value)
    raise ValueError(f"packed more than {_LAYERS} times")


def _without_layer(data: bytes) -> Any:
    """Take away one layer (zlib, gzip, pickle, JSON or base64); ValueError if it is none of
    these."""
    if data[:2] in _ZLIB or data[:2] == _GZIP:
        return _inflated(data)
    if data[:1] == _PICKLE:
        return _unpickled(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        if not _BASE64.fullmatch(data) or len(data) < 8:
            raise ValueError(f"neither JSON nor base64: {data[:60]!r} ({error})") from None
    try:
        return base64.b64decode(data.translate(bytes.maketrans(b"-_", b"+/")))
    except binascii.Error as error:
        raise ValueError(f"no base64: {data[:60]!r} ({error})") from None


def _inflated(data: bytes) -> bytes:
    """Decompress zlib or gzip; ValueError if damaged, or larger than _MOST_UNPACKED bytes."""
    engine = zlib.decompressobj(wbits=47)  # zlib's header or gzip's
    try:
        found = engine.decompress(data, _MOST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if engine.unconsumed_tail:
        raise ValueError(f"has more than {_MOST_UNPACKED} bytes when decompressed")
    if not engine.eof:
        raise ValueError("cannot be decompressed: its end is missing")
    return found


class _PlainOnly(pickle.Unpickler):
    """Reads texts, numbers and containers; no pickle of these names a class."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Refuse: what a pickle names here is called, and could be anything."""
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}")


def _unpickled(data: bytes) -> Any:
    """Return what a pickle of texts, numbers and containers has; ValueError for any other data."""
    try:
        return _PlainOnly(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001  # a broken pickle raises whatever its bytes lead to
        raise ValueError(f"is a pickle that cannot be read: {error}") from None
