"""Messages between the worker and the process of SGLang: pickles, each after its length.

Unpickling is safe here: the two processes trust each other, and the socket has no name by which
another process could reach it.
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
class StartMessage:
    """The first message to the process of SGLang: how to start the engine."""

    arguments: dict[str, Any]
    """Keyword arguments of SGLang's `Engine`."""
    tokenizer: str
    trust_remote_code: bool
    max_model_len: int
    """Largest length of prompt plus response, in tokens."""
    shapes: dict[str, tuple[int, ...]]
    """Hugging Face name -> shape, for every tensor of the checkpoint."""
    optional: frozenset[str]
    """Names of tensors that a push may leave out."""
    cpu: bool
    """True if the engine runs without a GPU."""
    name: str
    """Name of the worker, for error messages."""


@dataclass(frozen=True, slots=True)
class Call:
    """A message to run one method of `Replica`; `id` is repeated in the answer."""

    id: int
    method: Callable[..., Coroutine[Any, Any, Any]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result or the error of the call `id`; id 0 stands for the start of the engine."""

    id: int
    value: Any = None
    error: Exception | None = None


async def read(reader: asyncio.StreamReader) -> Any:
    """Wait for the next message and return it.

    Raises:
        EOFError, ConnectionError: the other process has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def write(writer: asyncio.StreamWriter, message: object) -> None:
    """Queue a message; the event loop sends it later, or drops it if the other process is gone."""
    writer.write(_packed(message))


def read_now(connection: socket.socket) -> Any:
    """Wait for the next message without an event loop, and return it.

    Raises:
        EOFError, ConnectionError: the other process has ended.
    """
    # Unbuffered: `server.main` then hands the socket to asyncio; reading ahead would lose calls.
    with connection.makefile("rb", buffering=0) as stream:
        (length,) = _LENGTH.unpack(_exactly(stream.read, _LENGTH.size))
        return pickle.loads(_exactly(stream.read, length))


def write_now(connection: socket.socket, message: object) -> None:
    """Send a message without an event loop; ConnectionError if the other process has ended."""
    connection.sendall(_packed(message))


def _packed(message: object) -> bytes:
    """Return the pickled message after its length, as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _exactly(take: Callable[[int], bytes], size: int) -> bytes:
    """Read exactly `size` bytes with `take`, which may return fewer at a time.

    Raises:
        EOFError: the stream ended before.
    """
    parts = bytearray()
    while len(parts) < size:
        part = take(size - len(parts))
        if not part:
            raise EOFError("the other side is gone")
        parts += part
    return bytes(parts)
