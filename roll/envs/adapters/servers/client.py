"""`Connection`: one episode's connection to a server, over HTTP or a WebSocket.

What a server sends is not trusted: its size and its form have limits here, the time that it takes
has those of `EnvHost`. Nothing is sent twice: a step that was perhaps taken must not be repeated,
and an episode that failed begins again as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from roll.envs.adapters.packages.errors import AdapterError

MAX_ANSWER_BYTES = 4 * 2**20
"""Largest answer that is read, unpacked."""
SHOWN_CHARS = 300
_NAMES = {float: "number", bool: "bool", dict: "JSON object", str: "text"}


class ServerError(Exception):
    """Error: a server gave no usable answer. The message has its address and what it said."""


def address(prefix: str, url: str) -> str:
    """Return the address of a server without a slash at its end; AdapterError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AdapterError(f"found the address {url!r}; expected {prefix}http://host:port")
    return url.rstrip("/")


def headers_of(api_key_env: str | None) -> dict[str, str]:
    """Return the headers that carry the key in an environment variable; AdapterError if it is not
    set."""
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise AdapterError(
            f"adapter.api_key_env: the environment variable {api_key_env} is not set; export the "
            "key in it"
        )
    return {"Authorization": f"Bearer {key}"}


class Connection:
    """Connection of one episode, with its own cookies. All calls come from one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Keep the address, without a slash at its end, and headers of all calls; connect later."""
        self.url = url
        self._headers = dict(headers)
        self._session: Any = None
        self._socket: Any = None

    async def post(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Post a JSON object and return the object that the server answers.

        Raises:
            ServerError: the server is not there, refuses the call, or answers something else.
        """
        call = self._open().post(
            f"{self.url}{path}",
            data=_sent(payload),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        )
        return await self._object(call, path)

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; ServerError as for `post`."""
        return await self._object(self._open().get(f"{self.url}{path}"), path)

    async def talk(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON object through the WebSocket, and return the object that comes back;
        ServerError as for `post`. The first call opens the WebSocket at its path, and later calls
        use the same one."""
        import aiohttp

        where = f"{self.url}{path}"
        try:
            if self._socket is None:
                self._socket = await self._open().ws_connect(where, max_msg_size=MAX_ANSWER_BYTES)
            await self._socket.send_str(_sent(payload).decode())
            message = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from None
        if message.type is aiohttp.WSMsgType.TEXT:
            return _parsed(where, message.data.encode())
        if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            raise ServerError(f"{where}: the answer is larger than {_limit()}")
        raise ServerError(
            f"{where}: the server closed the connection (code {self._socket.close_code})"
        )

    async def say(self, payload: Mapping[str, Any]) -> None:
        """Send a JSON object through the WebSocket if it is open, and expect no answer."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_str(_sent(payload).decode())

    async def close(self) -> None:
        """Close all connections. A second call does nothing."""
        session, self._session, self._socket = self._session, None, None
        if session is not None:
            await session.close()

    def _open(self) -> Any:
        """Return the session; make it for the first call."""
        import aiohttp

        if self._session is None:
            # Variables such as HTTPS_PROXY count, but nobody reaches this machine through a proxy.
            host = urlsplit(self.url).hostname or ""
            here = host == "localhost" or host.startswith("127.") or host == "::1"
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),  # the limits are those of EnvHost
                trust_env=not here,
                cookie_jar=aiohttp.CookieJar(unsafe=True),  # also of servers without a name
                headers=self._headers,
            )
        return self._session

    async def _object(self, call: Any, path: str) -> dict[str, Any]:
        """Return the JSON object that a call answers."""
        import aiohttp

        where = f"{self.url}{path}"
        body = bytearray()
        try:
            async with call as response:
                async for piece in response.content.iter_chunked(2**16):
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServerError(f"{where}: the answer is larger than {_limit()}")
                status = response.status
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from None
        if status != 200:
            raise ServerError(f"{where}: status {status}: {_shown(bytes(body))}")
        return _parsed(where, bytes(body))


def field(where: str, answer: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return a value of an answer.

    Args:
        where: address, for the message.
        answer: what the server said.
        key: name of the value.
        kind: its type; `float` takes whole numbers, and no number is taken for a bool.
        default: value of a missing key; None if it must not be missing.

    Raises:
        ServerError: it is missing or has another type.
    """
    value = answer.get(key)
    if value is None and default is not None:
        return default
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        found = f"is {json.dumps(value)[:60]}" if key in answer else "is missing"
        raise ServerError(f"{where}: {key!r} {found}; expected a {_NAMES[kind]}")
    return value


def _sent(payload: Mapping[str, Any]) -> bytes:
    """Return an object as JSON. What JSON does not know is text."""
    return json.dumps(payload, default=str).encode()


def _parsed(where: str, body: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer; ServerError, which begins with `where`, if it is
    none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{where}: the answer is not JSON: {_shown(body)}") from None
    if not isinstance(value, dict):
        raise ServerError(f"{where}: the answer is no JSON object: {_shown(body)}")
    return value


def _limit() -> str:
    return f"{MAX_ANSWER_BYTES // 2**20} MiB"


def _shown(body: bytes) -> str:
    """Return the beginning of an answer, on one line."""
    text = " ".join(body[: 4 * SHOWN_CHARS].decode(errors="replace").split())
    return text[:SHOWN_CHARS] or "an empty answer"
