"""`EnvProcesses` and `ProcessEnv`: environments whose episodes have a process each."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roll.core.errors import EnvironmentFailedError
from roll.envs.processes.child_main import HEADER
from roll.envs.processes.template import Started, Template

MAX_ANSWER_BYTES = 4 * 2**20
"""Largest answer of an environment that is taken."""
OBITUARY_TIMEOUT_S = 5.0
"""Longest wait for the report of how a process ended, in seconds."""


class EnvProcesses:
    """Function that makes the environment of one episode, in a process of its own.

    The template starts at once, so that mistakes show before any episode; and again before an
    episode if it has died. It ends with this object and the last of its
    environments, or with this process.
    """

    def __init__(
        self, name: str, python: str, spec: Mapping[str, Any], *, memory_bytes: int | None
    ) -> None:
        """Start the template.

        Args:
            name: name of the environment in the config.
            python: path of the interpreter.
            spec: what it loads, see `child_main.load`, without the limits.
            memory_bytes: memory that each episode may add; None sets no limit.

        Raises:
            ConfigError: the interpreter does not start, or the import of the environment fails.
        """
        self._name = name
        limits = {"memory_bytes": memory_bytes, "max_bytes": MAX_ANSWER_BYTES}
        self._arguments = (f"environments.{name}", python, {**spec, **limits})
        self._lock = threading.Lock()
        self._template = self._new()

    def __call__(self) -> ProcessEnv:
        """Start the process of an episode; start the template again if it has ended.

        Raises:
            ConfigError: the template does not start.
            EnvironmentFailedError: it has ended at once.
        """
        with self._lock:
            if not self._template.lost:
                with suppress(EnvironmentFailedError):  # it has ended at this very moment
                    return self._begin()
            self._template = self._new()
            return self._begin()

    def stop(self) -> None:
        """End the template and all episodes."""
        self._template.stop()

    def _begin(self) -> ProcessEnv:
        """Return the environment of a new episode of the present template."""
        return ProcessEnv(self, self._name, self._template, self._template.fork())

    def _new(self) -> Template:
        """Start a template, which ends with this object."""
        template = Template(*self._arguments)
        template.start()
        weakref.finalize(self, template.stop)
        return template


class ProcessEnv:
    """Environment of one episode in a process of its own. A call that is cancelled, by its time
    limit for instance, kills the process."""

    def __init__(
        self, owner: EnvProcesses, name: str, template: Template, started: Started
    ) -> None:
        """Take the process of an episode; `owner` is kept alive as long as this object is."""
        self._owner = owner  # whose end is the end of the template
        self._name = name
        self._template = template
        self._started = started
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._alive = True

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; errors are those of `_ask`.

        `options` are sent as JSON, and what JSON does not know as text.
        """
        plain = json.loads(json.dumps(options or {}, default=str))
        answer: tuple[Any, dict[str, Any]] = await self._ask(
            "reset", {"do": "reset", "seed": seed, "options": plain}
        )
        return answer

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        cut = bool(getattr(action, "cut", False))
        answer: tuple[Any, float, bool, bool, dict[str, Any]] = await self._ask(
            "step", {"do": "step", "action": action, "cut": cut}
        )
        info: Any = answer[-1] if isinstance(answer, list) and answer else None
        if isinstance(info, dict) and isinstance(rewards := info.get("rewards"), dict):
            info["rewards"] = {  # keys of JSON are text
                int(seat) if seat.isdecimal() else seat: value for seat, value in rewards.items()
            }
        return answer

    async def close(self) -> None:
        """Close the environment, if it is alive, and end its process."""
        try:
            if self._alive:
                await self._ask("close", {"do": "close"})
        finally:
            self._kill()
            if self._streams is None:
                self._started.link.close()
            else:
                self._streams[1].close()

    async def _ask(self, what: str, call: Mapping[str, Any]) -> Any:
        """Return the answer to a call; see `child_main.Episode`.

        Raises:
            EnvironmentFailedError: the environment raised, or its process ended.
        """
        where = f"environment {self._name!r}: {what}"
        try:
            reader, writer = await self._opened()
            body = json.dumps(call).encode()
            writer.write(HEADER.pack(len(body)) + body)
            await writer.drain()
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            if size > MAX_ANSWER_BYTES:
                self._kill()
                raise EnvironmentFailedError(
                    f"{where}: the answer has {size / 2**20:.1f} MiB; at most "
                    f"{MAX_ANSWER_BYTES / 2**20:g} MiB are taken"
                )
            said = json.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._alive = False
            raise EnvironmentFailedError(
                f"{where}: its process ended ({await self._how()}); a process that takes more than "
                "memory_gb ends so, too"
            ) from None
        except asyncio.CancelledError:
            self._kill()
            raise
        if "error" in said:
            raise EnvironmentFailedError(f"{where} raised {said['error']}")
        return said["answer"]

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection to the process; open it at the first call."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._started.link)
        return self._streams

    async def _how(self) -> str:
        """Return how the process ended."""
        ended = asyncio.shield(asyncio.wrap_future(self._started.ended))
        with suppress(TimeoutError):
            return await asyncio.wait_for(ended, OBITUARY_TIMEOUT_S)
        return "for an unknown reason"

    def _kill(self) -> None:
        """Kill the process; a later call of the environment fails."""
        self._alive = False
        self._template.kill(self._started.number)
