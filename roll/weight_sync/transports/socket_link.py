"""Messages between the leading sender and the other processes of one host, over Unix sockets.

The socket lives in Linux's abstract namespace, and the memory is passed as a file descriptor.
Neither has a name in a file system, so the kernel frees both whichever process dies. A wait blocks
in the kernel and takes no CPU time. A peer that dies closes its end and is noticed at once.
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
from roll.weight_sync.names import LEADER

_HEADER = struct.Struct("!I")
_AT_ONCE = 1 << 16
"""Bytes requested from the kernel in one call; most messages have a few dozen."""

_SLICE_S = 0.1
"""Time between two checks for an abort while waiting for a connection, in seconds."""
_LAST_WORDS_S = 1.0
"""Time limit of a last message to a peer that may no longer listen, in seconds."""


class Link:
    """A process's end of a connection.

    Args:
        peer: name of the other side in error messages.
        timeout_s: time limit of each single wait for the other side, in seconds.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._read = bytearray()
        """Bytes that have been received but not yet returned by `get`."""
        self._sending = False
        self.peer = peer
        connection.settimeout(timeout_s)

    def put(self, message: dict[str, Any], *, fds: tuple[int, ...] = ()) -> None:
        """Send one message and file descriptors, of which the other side gets its own copies.

        Raises:
            WeightSyncError: the other side died, or took nothing for `timeout_s`.
        """
        body = json.dumps(message).encode()
        rest = _HEADER.pack(len(body)) + body
        self._sending = True
        try:
            if fds:  # descriptors are sent with the first bytes
                rest = rest[socket.send_fds(self._socket, [rest], list(fds)) :]
            if rest:  # sendall(b"") fails if the other side has read everything and closed
                self._socket.sendall(rest)
        except OSError as error:
            raise self._broken("send to", error) from error
        finally:
            self._sending = False

    def get(self, doing: str, *, max_fds: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message; return it and its file descriptors.

        Args:
            doing: what this process is doing, for the error message.
            max_fds: largest number of descriptors that may come.

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
        """Shorten the time limit of further messages: the other side is only to be sent away."""
        self._timeout_s = _LAST_WORDS_S
        self._socket.settimeout(_LAST_WORDS_S)

    def break_off(self, reason: str) -> None:
        """End this side's wait for the other side; to be called from another thread.

        The wait ends with a WeightSyncError which says that the connection was closed. The other
        side can still be sent the reason within a short time limit, unless a message to it was
        interrupted.

        Args:
            reason: not used here; `Abort.when_given_up` calls this method with it.
        """
        with contextlib.suppress(OSError):  # closed already, or not yet connected
            self._socket.settimeout(_LAST_WORDS_S)
            self._socket.shutdown(socket.SHUT_RDWR if self._sending else socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, size: int, fds: list[int], max_fds: int) -> None:
        """Read until `size` bytes are buffered; one call usually gets a whole message."""
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
        """Return the error to raise: the time limit passed, or the connection broke.

        Args:
            doing: verb that takes the other side as its object, such as `send to`, for the message.
        """
        if isinstance(error, TimeoutError):
            return WeightSyncError(
                f"weight transfer: could not {doing} {self.peer} within {self._timeout_s:g} s; "
                "it may hang or be overloaded"
            )
        return WeightSyncError(
            f"weight transfer: could not {doing} {self.peer}: {error}; its process probably died"
        )


class Listener:
    """The leading sender's listening socket, which waits for all other processes."""

    def __init__(
        self, address: str, timeout_s: float, abort: Abort, user: int | None = None
    ) -> None:
        """Listen on `address`.

        Args:
            address: name of the socket in Linux's abstract namespace.
            timeout_s: time limit until all processes have connected, and of each later wait for one
                of them, in seconds.
            abort: lets another thread end the wait for the processes, and later the links to them.
            user: id of the user whose processes may connect; default: this process's user.
        """
        self._user = os.getuid() if user is None else user
        self._timeout_s = timeout_s
        self._abort = abort
        self._lingers = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"\0" + address.encode())
        self._socket.listen(1024)

    def accept_all(self, names: Sequence[str]) -> dict[str, Link]:
        """Wait until a process has connected for each of `names`; return name -> link.

        A process tells its name in its first message.

        Raises:
            WeightSyncError: a process did not connect in time (the message names it), an unexpected
                one did, or the transfer was given up. Processes that connect later are told so.
        """
        links: dict[str, Link] = {}
        unnamed: Link | None = None
        """Link of the process that has connected but not sent its name yet."""
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(links) < len(names):
                missing = [name for name in names if name not in links]
                link = unnamed = self._accept(deadline, missing)
                self._abort.check()  # before `break_off`, which ends the read of the name
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
        """Tell `first`, which has just connected, and `count` later processes to stop.

        This runs in the background. Without it, these processes would wait for a sender until their
        time limit.
        """
        self._lingers = True

        def send_away(link: Link) -> None:
            with contextlib.suppress(WeightSyncError):
                link.get("handshake")
            with contextlib.suppress(WeightSyncError):
                link.put({"stop": reason})
            link.close()

        def tell() -> None:
            """Send away `first`, then `count` processes that connect within the time limit."""
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
        """Return the next connection of the same user, and close those of other users.

        Args:
            deadline: reading of `time.monotonic`.
            missing: names of the processes that have not connected, for the message.

        Raises:
            WeightSyncError: nobody came before `deadline`, or the transfer was given up.
        """
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
    address: str, name: str, timeout_s: float, abort: Abort | None = None, user: int | None = None
) -> Link:
    """Connect to the leading sender, which may start later, and send it this process's `name`.

    Args:
        address: name of its socket in Linux's abstract namespace.
        timeout_s: time limit of this wait, and of each later wait for the sender, in seconds.
        abort: lets another thread end the wait, and later the link.
        user: id of the user whose process must listen there; default: this process's user.

    Raises:
        WeightSyncError: no process listens on `address` within `timeout_s`, a process of another
            user does, or the transfer was given up.
    """
    user = os.getuid() if user is None else user
    connection = _wait_for_listener(address, name, timeout_s, abort)
    if (found := _user_of(connection)) != user:
        connection.close()
        raise WeightSyncError(
            f"weight transfer: a process of user {found} listens at {address}, where the "
            f"sender of user {user} was expected; all of a run must belong to one user"
        )
    link = Link(connection, LEADER, timeout_s)
    if abort is not None:
        abort.when_given_up(link.break_off)
    link.put({"name": name})
    return link


def _wait_for_listener(
    address: str, name: str, timeout_s: float, abort: Abort | None
) -> socket.socket:
    """Return a socket connected to `address`, as soon as a process listens there.

    Raises:
        WeightSyncError: none does within `timeout_s` seconds (the message says that `name` waited),
            or the transfer was given up.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0002
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(b"\0" + address.encode())
            return connection
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


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it.

    This is the only access control: abstract sockets have no file permissions.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
