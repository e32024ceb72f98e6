"""Messages between the leading sender and the others on one host, over a Unix domain socket.

The socket lives in Linux's abstract namespace and the memory travels as a file descriptor, so
neither leaves a name in any file system: whatever dies, the kernel frees both. Waiting blocks in
the kernel and costs nothing; a peer that dies closes its end and is noticed at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort

_HEADER = struct.Struct("!I")
_AT_ONCE = 1 << 16
"""Bytes asked of the kernel in one call; most messages have a few dozen."""

_SLICE_S = 0.1
"""How often who waits for a connection looks whether the transfer is given up."""
_LAST_WORDS_S = 1.0
"""For a message to a peer that may not listen any more."""


class Link:
    """One connected end; `peer` names the other side in errors."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._read = bytearray()
        """What has come in and not been asked for."""
        self._sending = False
        self.peer = peer
        connection.settimeout(timeout_s)

    def put(self, message: dict[str, Any], *, fds: tuple[int, ...] = ()) -> None:
        """Send one message; with it, file descriptors the other side gets its own copies of."""
        body = json.dumps(message).encode()
        rest = _HEADER.pack(len(body)) + body
        self._sending = True
        try:
            if fds:  # they ride on the first bytes
                rest = rest[socket.send_fds(self._socket, [rest], list(fds)) :]
            if rest:  # sending nothing fails, too, when the other side has read all and gone
                self._socket.sendall(rest)
        except OSError as error:
            raise self._broken("send to", error) from error
        finally:
            self._sending = False

    def get(self, doing: str, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors.

        Raises:
            WeightSyncError: the other side died, or sent nothing for `timeout_s`.
        """
        fds: list[int] = []
        try:
            self._fill(_HEADER.size, fds, max_fds)
            end = _HEADER.size + _HEADER.unpack_from(self._read)[0]
            self._fill(end, fds, max_fds)
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise self._broken(f"{doing}: wait for", error) from error
        message: dict[str, Any] = json.loads(self._read[_HEADER.size : end])
        del self._read[:end]
        return message, fds

    def be_brief(self) -> None:
        """Wait for the other side no longer than for last words."""
        self._timeout_s = _LAST_WORDS_S
        self._socket.settimeout(_LAST_WORDS_S)

    def break_off(self, reason: str) -> None:
        """End a wait for the other side, from another thread; it can still be told why, in short
        words and if it listens."""
        with contextlib.suppress(OSError):  # closed, or never quite there
            self._socket.settimeout(_LAST_WORDS_S)
            self._socket.shutdown(socket.SHUT_RDWR if self._sending else socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, size: int, fds: list[int], max_fds: int) -> None:
        """Read until `size` bytes are there, as a rule a whole message in one call."""
        while len(self._read) < size:
            if max_fds:
                part, new_fds, _, _ = socket.recv_fds(self._socket, _AT_ONCE, max_fds)
                fds += new_fds
            else:
                part = self._socket.recv(_AT_ONCE)
            if not part:
                raise ConnectionResetError("connection closed")
            self._read += part

    def _broken(self, doing: str, error: OSError) -> WeightSyncError:
        if isinstance(error, TimeoutError):
            return WeightSyncError(
                f"weight transfer: could not {doing} {self.peer} within {self._timeout_s:g} s; "
                "it may hang or be overloaded"
            )
        return WeightSyncError(
            f"weight transfer: could not {doing} {self.peer}: {error}; its process probably died"
        )


class Listener:
    """The leading sender's end: waits for all others."""

    def __init__(
        self, address: str, timeout_s: float, abort: Abort, user: int | None = None
    ) -> None:
        """`user`: the only one whose processes are listened to; this process's own if left out."""
        self._user = os.getuid() if user is None else user
        self._timeout_s = timeout_s
        self._abort = abort
        self._lingers = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"\0" + address.encode())
        self._socket.listen(1024)

    def accept_all(self, names: Sequence[str]) -> dict[str, Link]:
        """One link for each of `names`, under which the others introduce themselves.

        Raises:
            WeightSyncError: names who did not come in time; or the transfer was given up. Those
                who come later are told so.
        """
        links: dict[str, Link] = {}
        unnamed: Link | None = None
        """Has come, and is none of `links` yet."""
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(links) < len(names):
                missing = [name for name in names if name not in links]
                link = unnamed = self._accept(deadline, missing)
                self._abort.check()  # before it is broken off, which keeps it from saying its name
                self._abort.when_given_up(link.break_off)
                link.peer = link.get("handshake")[0]["name"]
                if link.peer not in missing:
                    raise WeightSyncError(
                        f"{link.peer} is not expected, or has come before; the transfer has "
                        f"{', '.join(names)}, and each takes part once"
                    )
                links[link.peer], unnamed = link, None
        except BaseException as error:
            reason = self._abort.reason or str(error)
            for link in links.values():
                with contextlib.suppress(WeightSyncError):
                    link.put({"stop": reason})
                link.close()
            self._linger(reason, len(names) - len(links), unnamed)
            raise
        return links

    def _linger(self, reason: str, count: int, first: Link | None) -> None:
        """Tell `first`, which has just come, and `count` more, in the background: they would wait
        for a sender until their limit."""
        self._lingers = True

        def send_away(link: Link) -> None:
            with contextlib.suppress(WeightSyncError):
                link.get("handshake")
            with contextlib.suppress(WeightSyncError):
                link.put({"stop": reason})
            link.close()

        def tell() -> None:
            deadline = time.monotonic() + self._timeout_s
            with self._socket:
                if first is not None:
                    first.be_brief()
                    send_away(first)
                for _ in range(count):
                    self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                    try:
                        connection, _ = self._socket.accept()
                    except OSError:
                        return
                    send_away(Link(connection, "somebody late", _LAST_WORDS_S))

        threading.Thread(target=tell, name="roll-late-receivers", daemon=True).start()

    def _accept(self, deadline: float, missing: list[str]) -> Link:
        while True:
            self._abort.check()
            self._socket.settimeout(min(max(deadline - time.monotonic(), 1e-3), _SLICE_S))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError as error:
                if time.monotonic() < deadline:
                    continue
                raise WeightSyncError(
                    f"weight transfer: {', '.join(missing)} did not connect within "
                    f"{self._timeout_s:g} s"
                ) from error
            if _user_of(connection) == self._user:
                return Link(connection, "somebody new", self._timeout_s)
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._lingers:
            self._socket.close()


def connect(
    address: str,
    name: str,
    timeout_s: float,
    abort: Abort | None = None,
    user: int | None = None,
) -> Link:
    """The end of a receiver, or of another sender; the leading sender may start later.

    Args:
        user: the only one whose processes are spoken to; this process's own if left out.

    Raises:
        WeightSyncError: nobody listens on `address` within `timeout_s`, somebody else's process
            does, or the transfer was given up.
    """
    user = os.getuid() if user is None else user
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0002
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(b"\0" + address.encode())
        except (ConnectionRefusedError, BlockingIOError) as error:
            connection.close()
            if abort is not None:
                abort.check()
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"weight transfer: {name} waited {timeout_s:g} s for a sender at {address}"
                ) from error
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
            continue
        if (found := _user_of(connection)) != user:
            connection.close()
            raise WeightSyncError(
                f"weight transfer: a process of user {found} listens at {address}, where the "
                f"sender of user {user} was expected; all of a run must belong to one user"
            )
        link = Link(connection, "the sender", timeout_s)
        if abort is not None:
            abort.when_given_up(link.break_off)
        link.put({"name": name})
        return link


def _user_of(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel knows: abstract sockets have no file permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
