"""Messages with open descriptors, between the supervisor and the template."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

_LARGEST, _MOST = 1 << 16, 16


def send_packet(
    link: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send one message of plain values, and a copy of each descriptor."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(link, [data], list(descriptors))
    else:
        link.send(data)


def receive_packet(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other end is closed."""
    data, descriptors, _, _ = socket.recv_fds(link, _LARGEST, _MOST)
    return (json.loads(data), descriptors) if data else None
