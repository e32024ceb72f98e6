"""Messages between the worker and the process that holds SGLang: pickles with a length before them.

Both ends are ours and the socket has no name, so nobody else can send anything to unpickle.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Order:
    """How to start: the first message."""

    arguments: dict[str, Any]
    """Of SGLang's `Engine`."""
    tokenizer: str
    trust_remote_code: bool
    max_model_len: int
    """Longest prompt plus response, in tokens."""
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor of the checkpoint, by Hugging Face name."""
    optional: frozenset[str]
    """Names that a push may leave out."""
    cpu: bool
    """No GPU."""
    name: str
    """Of the worker, for errors."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method of `Replica` to run, and its arguments."""

    id: int
    method: Callable[..., Coroutine[Any, Any, Any]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of the call `id`; 0 is the start itself."""

    id: int
    value: Any = None
    error: Exception | None = None


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message.

    Raises:
        EOFError, ConnectionError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue a message; it leaves when the loop gets round to it."""
    writer.write(_packed(message))


def read_now(connection: socket.socket) -> Any:
    """The next message, without an event loop; nothing may follow it yet."""
    with connection.makefile("rb", buffering=0) as stream:
        (length,) = _LENGTH.unpack(_exactly(stream.read, _LENGTH.size))
        return pickle.loads(_exactly(stream.read, length))


def write_now(connection: socket.socket, message: object) -> None:
    """Send a message, without an event loop."""
    connection.sendall(_packed(message))


def _packed(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _exactly(take: Callable[[int], bytes], size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = take(size - len(parts))
        if not part:
            raise EOFError("the other side is gone")
        parts += part
    return bytes(parts)
