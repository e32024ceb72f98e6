"""`JsonClient`: posts JSON to a service, and tries again where that may help.

What a service sends is not trusted: its size, its form and the time it takes have limits.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from roll.config.sections.services.service import ServiceConfig
from roll.core.errors import ConfigError
from roll.rewards.packages import optional_package
from roll.rewards.service.turns import Turns

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which another try may succeed."""
OVERLOADED = frozenset({429, 503, 529})
"""HTTP statuses after which other calls wait as well, if the service says how long."""
MAX_ANSWER_BYTES = 4 * 2**20
"""Largest answer that is read, unpacked."""
FIRST_WAIT_S = 0.5
"""Longest wait before the second try, in seconds; it doubles with each further try."""
MAX_WAIT_S = 30.0
"""Longest wait between tries that the service has not asked for, in seconds."""
MAX_ASKED_WAIT_S = 300.0
"""Longest `Retry-After` that is followed, in seconds; a longer one fails the call."""
SHOWN_CHARS = 300


def find_key(where: str, config: ServiceConfig, environ: Mapping[str, str]) -> str | None:
    """Return the key for a service from the environment; None if it needs none.

    Args:
        where: key of the service in the config, such as `judges.strong`, for the message.

    Raises:
        ConfigError: the variable that the config names is not set.
    """
    variable = config.api_key_env
    if variable is None:
        return None
    if not environ.get(variable):
        raise ConfigError(
            f"{where}.api_key_env: the environment variable {variable} is not set; export the key "
            "in it"
        )
    return environ[variable]


class ServiceError(Exception):
    """Error: a service gave no usable answer, after all tries or because it refused the call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a service."""

    value: Any
    """The JSON value."""
    latency_s: float
    """Time of the try that succeeded, in seconds, without waits."""
    tries: int


class _Again(Exception):
    """Error: a try failed and may be repeated.

    Args:
        wait_s: wait that the service asks for, in seconds.
        for_all: True if other calls should wait as well.
    """

    def __init__(self, why: str, wait_s: float = 0.0, *, for_all: bool = False) -> None:
        """Keep the reason of the failure and the wait, see the class."""
        super().__init__(why)
        self.wait_s = wait_s
        self.for_all = for_all


class JsonClient:
    """Client of one service. `open` and all later calls must run on one event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        key: str | None = None,
        *,
        sharers: int = 1,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        """Prepare the client.

        Args:
            config: the service and its limits.
            key: key of the user; None sends none.
            sharers: number of workers that share the limits in equal parts.
            first_wait_s: longest wait before the second try, in seconds.

        Raises:
            ConfigError: the package aiohttp is missing.
        """
        self._aiohttp = optional_package("aiohttp", "aiohttp", "services are asked")
        self._config = config
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        rate = config.requests_per_minute
        self._turns = Turns(max(1, config.concurrency // sharers), rate and rate / sharers)
        self._first_wait_s = first_wait_s
        self._session: Any = None

    async def open(self) -> None:
        """Open the connection pool."""
        # Variables such as HTTPS_PROXY count, but nobody reaches this machine through a proxy.
        host = urlsplit(self._config.url).hostname or ""
        here = host == "localhost" or host.startswith("127.") or host == "::1"
        self._session = self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=self._aiohttp.ClientTimeout(total=self._config.timeout_s),
            trust_env=not here,
            cookie_jar=self._aiohttp.DummyCookieJar(),
            headers=self._headers,
        )

    async def close(self) -> None:
        """Close all connections; do nothing before `open`."""
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, payload: Mapping[str, Any]) -> Reply:
        """Post a JSON object and return the JSON answer; call `open` first.

        Raises:
            ServiceError: no try succeeded, or the service refused the call; the message has what it
                said.
        """
        body = json.dumps(payload).encode()
        async with self._turns.call():
            for tried in range(1, self._config.tries + 1):
                await self._turns.begin()
                begun_s = asyncio.get_running_loop().time()
                try:
                    value = await self._try(url, body)
                    return Reply(value, asyncio.get_running_loop().time() - begun_s, tried)
                except _Again as failed:
                    last = failed
                if tried < self._config.tries:
                    await self._wait(url, tried, last)
        raise ServiceError(f"{url}: {last} (tried {self._config.tries} times)")

    async def _wait(self, url: str, tried: int, failed: _Again) -> None:
        """Wait before the next try; ServiceError if the service asks for too long a wait."""
        asked_s = failed.wait_s
        if asked_s > MAX_ASKED_WAIT_S:
            raise ServiceError(
                f"{url}: {failed}, and asks to wait {asked_s:g} s, more than the "
                f"{MAX_ASKED_WAIT_S:g} s that are waited"
            )
        if failed.for_all:
            self._turns.pause(asked_s)
        longest_s = min(MAX_WAIT_S, self._first_wait_s * 2 ** (tried - 1))
        # Random, so that calls that failed together do not come back together.
        await asyncio.sleep(asked_s + random.uniform(0, longest_s))

    async def _try(self, url: str, body: bytes) -> Any:
        """Return the JSON answer of one try; _Again if another may succeed, else ServiceError."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as response:
                text = await _read(url, response)
                status, asked = response.status, response.headers.get("Retry-After")
        except TimeoutError:
            raise _Again(f"no answer within timeout_s = {self._config.timeout_s:g}") from None
        except self._aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if status in RETRIED:
            wait_s = 0.0 if asked is None else _seconds(asked)
            why = f"status {status}: {_shown(text)}"
            raise _Again(why, wait_s, for_all=status in OVERLOADED)
        if status != 200:
            raise ServiceError(f"{url}: status {status}: {_shown(text)}")
        try:
            return json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _Again(f"the answer is not JSON ({error}): {_shown(text)}") from None


async def _read(url: str, response: Any) -> bytes:
    """Return the body of an answer; ServiceError if it is too large."""
    body = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ServiceError(f"{url}: the answer is larger than {MAX_ANSWER_BYTES // 2**20} MiB")
    return bytes(body)


def _seconds(asked: str) -> float:
    """Return the seconds to wait of a `Retry-After`, which has seconds or a date; 0 if it has
    neither."""
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(asked)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _shown(body: bytes) -> str:
    """Return the begin of an answer, on one line."""
    text = " ".join(body[: 4 * SHOWN_CHARS].decode(errors="replace").split())
    return text[:SHOWN_CHARS] or "an empty answer"


def _no_constant(name: str) -> float:
    """Refuse NaN and infinity in an answer; ValueError."""
    raise ValueError(f"{name} is no JSON number")
