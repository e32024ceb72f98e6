"""`roll sandbox serve`: a sandbox that other machines ask over HTTP.

Everybody who has the token can run programs here, at the level of the sandbox. Nothing of a request
is trusted but that.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from roll.config.errors import ConfigError, UserError
from roll.distributed.processes.shutdown import Terminated, orderly_end
from roll.rewards.packages import optional_package
from roll.sandbox import NoLevelError, Sandbox, SandboxError, Session
from roll.sandbox.remote.messages import (
    PROTOCOL,
    TOKEN_VARIABLE,
    outcome_message,
    read_job,
    read_limits,
    read_text,
)

MOST_BYTES = 2**28
"""Largest request."""
SHORTEST_TOKEN = 16
QUEUE_S = 60.0
"""How long a program waits for a worker before it is refused."""
_LOOK_S = 5.0


@dataclass(eq=False)
class _Held:
    """A session of a client."""

    session: Session
    used: float
    running: int = 0


@dataclass(eq=False)
class SandboxServer:
    """Answers requests; see docs/sandbox.md for them."""

    sandbox: Sandbox
    token: str
    queue: int
    """Programs that may wait beside those that run; further ones are refused with 503."""
    most_sessions: int
    idle_s: float = 600.0
    """A session that nobody has called for so long is ended."""
    _sessions: dict[str, _Held] = field(default_factory=dict, init=False)
    _waiting: int = field(default=0, init=False)
    _running: int = field(default=0, init=False)
    _opening: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._web = optional_package("aiohttp.web", "aiohttp", "sandbox is served")
        self._places = asyncio.Semaphore(self.sandbox.width)

    def app(self) -> Any:
        """Return the application for aiohttp."""
        made = self._web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard()])
        made.router.add_get("/health", self._health)
        made.router.add_post("/run", self._run)
        made.router.add_post("/sessions", self._open)
        made.router.add_post("/sessions/{name}/run", self._call)
        made.router.add_delete("/sessions/{name}", self._close)
        made.cleanup_ctx.append(self._watched)
        return made

    def _guard(self) -> Any:
        """Return what asks for the token, and makes answers of errors."""

        async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return self._failed(401, f"expected the token of {TOKEN_VARIABLE}")
            try:
                return await handler(request)
            except ValueError as error:
                return self._failed(400, str(error))
            except SandboxError as error:
                return self._failed(500, str(error))

        return self._web.middleware(guard)

    def _failed(self, status: int, why: str) -> Any:
        return self._web.json_response({"error": why}, status=status)

    async def _health(self, request: Any) -> Any:
        return self._web.json_response(
            {
                "protocol": PROTOCOL,
                "level": self.sandbox.level,
                "workers": self.sandbox.width,
                "running": self._running,
                "waiting": self._waiting,
                "queue": self.queue,
                "sessions": len(self._sessions),
                "most_sessions": self.most_sessions,
            }
        )

    async def _run(self, request: Any) -> Any:
        job, limits = read_job(await _message(request))
        async with self._place() as found:
            if not found:
                return self._failed(503, "no room: as many programs wait as may")
            outcome = await self.sandbox.run(job.program, job.stdin, job.files, limits)
        return self._web.json_response(outcome_message(outcome))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[bool]:
        """Wait for a place in which a program may run; say False if too many wait, or too long."""
        if self._waiting >= self.queue and self._places.locked():
            yield False
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._places.acquire()
        except TimeoutError:
            yield False
            return
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield True
        finally:
            self._running -= 1
            self._places.release()

    # -- sessions ----------------------------------------------------------------------------

    async def _open(self, request: Any) -> Any:
        message = await _message(request)
        limits = read_limits(_only(message, "limits").get("limits", {}))
        if len(self._sessions) + self._opening >= self.most_sessions:
            return self._failed(503, f"no room: {self.most_sessions} sessions are open")
        session, name = self.sandbox.session(limits), secrets.token_hex(16)
        self._opening += 1
        try:
            await session.__aenter__()
            self._sessions[name] = _Held(session, time.monotonic())
        finally:
            self._opening -= 1
        return self._web.json_response({"session": name})

    async def _call(self, request: Any) -> Any:
        program = read_text(_only(await _message(request), "program").get("program"), "program")
        held = self._sessions.get(request.match_info["name"])
        if held is None:
            return self._failed(404, "no such session: it has ended, or was idle for too long")
        held.running += 1
        try:
            async with self._place() as found:
                if not found:
                    return self._failed(503, "no room: as many programs wait as may")
                outcome = await held.session.run(program)
        finally:
            held.running -= 1
            held.used = time.monotonic()
            if not held.session.open:
                self._sessions.pop(request.match_info["name"], None)
        message = {"outcome": outcome_message(outcome), "open": held.session.open}
        return self._web.json_response(message)

    async def _close(self, request: Any) -> Any:
        held = self._sessions.pop(request.match_info["name"], None)
        if held is not None:
            await held.session.__aexit__(None, None, None)
        return self._web.json_response({})

    async def _watched(self, app: Any) -> AsyncIterator[None]:
        """End idle sessions while the server runs, and all of them at its end."""
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()
        for held in [*self._sessions.values()]:
            await held.session.__aexit__(None, None, None)
        self._sessions.clear()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self.idle_s / 2))
            before = time.monotonic() - self.idle_s
            idle = [
                n for n, each in self._sessions.items() if not each.running and each.used < before
            ]
            for name in idle:
                held = self._sessions.get(name)
                # It may have been called while the one before it ended.
                if held is not None and not held.running and held.used < before:
                    del self._sessions[name]
                    await held.session.__aexit__(None, None, None)


async def _message(request: Any) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON: {error}") from None


def _only(message: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(message, dict) or set(message) - {key}:
        raise ValueError(f"expected a JSON object with `{key}` alone")
    return message


def token_of(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token that clients must have.

    Raises:
        ConfigError: there is none, or one that could be guessed.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"the environment variable {TOKEN_VARIABLE} must hold a token of at least "
            f"{SHORTEST_TOKEN} ASCII characters, found {len(token)}; for example "
            f"export {TOKEN_VARIABLE}=$(openssl rand -hex 32), the same where runs start"
        )
    return token


async def _listen(site: Any, host: str, port: int) -> None:
    """Begin to listen; UserError if the address cannot be used."""
    try:
        await site.start()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {error.strerror}; name an address of this machine, and "
            "a port that is free"
        ) from None


def _asked_to_end() -> asyncio.Queue[int]:
    """Return a queue that gets the number of a signal that asks the process to end. A Ctrl-C after
    it does not wait for the programs that run."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[int] = asyncio.Queue()

    def ask(number: int) -> None:
        loop.remove_signal_handler(signal.SIGINT)
        asked.put_nowait(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask, number)
    return asked


def serve(
    *,
    host: str,
    port: int,
    level: str,
    workers: int | None,
    preload: Sequence[str],
    readable: Sequence[str],
    queue: int | None,
    sessions: int | None,
    said: Callable[[str], None],
) -> None:
    """Serve until a signal comes, which is raised as `Terminated`.

    Args:
        host, port: address to listen at.
        level, workers, preload, readable: of `Sandbox`.
        queue: programs that may wait; None: eight for each worker.
        sessions: sessions that may be open; None: sixteen for each worker.
        said: takes a line about the level and the address.

    Raises:
        ConfigError: there is no token, or the level does not work here.
        UserError: the address cannot be used.
    """
    token = token_of()
    web = optional_package("aiohttp.web", "aiohttp", "sandbox is served")
    try:
        sandbox = Sandbox(level, workers=workers, preload=preload, readable=readable)
    except (NoLevelError, ValueError) as error:
        raise ConfigError(str(error)) from None

    async def serve_until_asked() -> int:
        asked = _asked_to_end()  # before anybody is told that they may ask
        server = SandboxServer(
            sandbox,
            token,
            queue=8 * sandbox.width if queue is None else queue,
            most_sessions=16 * sandbox.width if sessions is None else sessions,
        )
        runner = web.AppRunner(server.app(), handler_cancellation=True)
        await runner.setup()
        try:
            await _listen(web.TCPSite(runner, host, port), host, port)
            said(f"listening at http://{host}:{port}")
            return await asked.get()
        finally:
            await runner.cleanup()

    with orderly_end() as cleanups:
        cleanups.enter_context(sandbox)
        said(f"level {sandbox.level}, {sandbox.width} programs at the same time")
        for name, why in sandbox.refused.items():
            said(f"not {name}: {why}")
        number = asyncio.run(serve_until_asked())
    raise Terminated(number)
