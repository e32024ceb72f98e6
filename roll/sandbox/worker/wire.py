"""Frames between a sandbox and its workers: a header of plain values, and pieces of bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

Frame = tuple[dict[str, Any], list[bytes]]


def send_frame(link: socket.socket, header: Mapping[str, Any], *pieces: bytes) -> None:
    """Send one frame; waits while the other end is busy."""
    head = json.dumps({**header, "pieces": [len(piece) for piece in pieces]}).encode()
    link.sendall(struct.pack("!I", len(head)) + head + b"".join(pieces))


def receive_frame(link: socket.socket) -> Frame | None:
    """Return the next frame; None if the other end is closed."""
    size = _exactly(link, 4)
    if size is None:
        return None
    head = _exactly(link, struct.unpack("!I", size)[0])
    if head is None:
        return None
    header = json.loads(head)
    pieces: Sequence[bytes | None] = [_exactly(link, n) for n in header.pop("pieces")]
    whole = [piece for piece in pieces if piece is not None]
    return (header, whole) if len(whole) == len(pieces) else None


def _exactly(link: socket.socket, size: int) -> bytes | None:
    """Return the next `size` bytes; None if the other end closes before."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            got = link.recv_into(view[have:])
        except ConnectionResetError:
            return None
        if not got:
            return None
        have += got
    return bytes(data)
