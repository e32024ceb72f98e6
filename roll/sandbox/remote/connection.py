"""`Connection`: requests to one host, one after another, that another thread can break off."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CONNECT_S = 5.0
IDLE_S = 20.0
"""How long a connection is used again; hosts close those that are idle for longer."""


_LONGEST_S = 2**31 // 1000 - 1
"""Longest time that the kernel waits, more than three weeks."""
_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
"""A machine that is gone is noticed after a minute and a half; the kernel's own 2 h are longer than
any program may run."""


class HostLostError(Exception):
    """A host cannot be reached, or broke off."""

    def __init__(self, why: str, *, accepted: bool = False) -> None:
        """Keep the reason, and whether the host had the whole request, so that it may have run."""
        super().__init__(why)
        self.accepted = accepted


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a host."""

    status: int
    body: bytes
    retry_after_s: float
    took_s: float
    """Time from the request to its end."""

    def json(self) -> Any:
        """Return its JSON value; ValueError if there is none."""
        return json.loads(self.body, parse_constant=_no_constant)

    @property
    def error(self) -> str:
        """Its message, on one line."""
        try:
            found = self.json()
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            told = found.get("error") or found.get("message") or found.get("detail")
            if told is not None:
                return " ".join(str(told).split())[:500]
        return " ".join(self.body[:200].decode("utf-8", "replace").split())


class Connection:
    """A connection to one host, which is made at the first request and kept for the next."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Keep the address, and what each request carries."""
        parts = urlsplit(url)
        self._path, self._headers = parts.path.rstrip("/"), dict(headers)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._http = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)
        self._last_used = 0.0
        self._broken_off = False
        self._lock = threading.Lock()

    def ask(
        self, method: str, path: str, message: Any, *, timeout_s: float, most_bytes: int
    ) -> Answer:
        """Send a JSON value, and return the answer. None sends no body.

        Args:
            method, path: of the request; the path is put behind that of the address.
            message: JSON value.
            timeout_s: how long the host may be silent.
            most_bytes: largest answer.

        Raises:
            HostLostError: there is no answer.
        """
        body = None if message is None else json.dumps(message).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        accepted, began = False, time.monotonic()
        try:
            link = self._connected()
            link.settimeout(min(timeout_s, _LONGEST_S))
            self._http.request(method, self._path + path, body, headers)
            accepted = True
            response = self._http.getresponse()
            data = response.read(most_bytes + 1)
            if len(data) > most_bytes:
                raise HostLostError(f"answered with more than {most_bytes} bytes", accepted=True)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            raise HostLostError(told, accepted=accepted) from error
        except BaseException:
            self.close()
            raise
        self._last_used = time.monotonic()
        after_s = _seconds(response.headers.get("Retry-After"))
        return Answer(response.status, data, after_s, self._last_used - began)

    def _connected(self) -> socket.socket:
        if self._http.sock is not None and time.monotonic() - self._last_used > IDLE_S:
            self.close()
        if self._http.sock is None:
            self._http.timeout = CONNECT_S
            self._http.connect()
        link: socket.socket = self._http.sock
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        with self._lock:
            if self._broken_off:
                raise HostLostError("broken off")
        return link

    def break_off(self) -> None:
        """End the request that runs now, from another thread, and refuse those after it."""
        with self._lock:
            self._broken_off = True
            link = self._http.sock
            if link is not None:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request makes another."""
        self._http.close()


def _seconds(asked: str | None) -> float:
    """Return the seconds of a `Retry-After`, at most ten; 0 if it has none."""
    try:
        return min(10.0, max(0.0, float(asked or 0)))
    except ValueError:
        return 0.0


def _no_constant(text: str) -> Any:
    raise ValueError(f"found {text}, which is not JSON")
