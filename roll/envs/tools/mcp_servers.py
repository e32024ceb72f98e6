"""Tools of MCP servers, over stdio or streamable HTTP, by the official package `mcp`."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.packages import agent_package


@dataclass(eq=False)
class Connection:
    """Connection to one server. A task of its own opens and closes it, because the package wants
    both in the same task."""

    server: McpServer
    _client: Any = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _end: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: str = field(default="", init=False)

    async def opened(self) -> Any:
        """Return the client; connect first if nobody has.

        Raises:
            EnvironmentFailedError: the server does not start, does not answer, or is gone.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._serve())
        await self._ready.wait()
        if self._failure:
            raise EnvironmentFailedError(f"MCP server {self.server.shown}: {self._failure}")
        return self._client

    @property
    def usable(self) -> bool:
        """True until it has failed or ended."""
        return not self._failure and not self._end.is_set()

    async def close(self) -> None:
        """End the connection, and the server if it is a process."""
        self._end.set()
        if self._task is not None:
            with suppress(Exception):
                await self._task

    def broken(self, why: str) -> None:
        """Note that the server does not answer: the next episode connects anew."""
        self._failure = self._failure or why
        self._end.set()

    async def _serve(self) -> None:
        """Hold the connection until `close` or a failure. `_ready` is set when it is open or has
        failed; `_failure` then says why."""
        mcp = agent_package("mcp", "mcp", "mcp")
        server = self.server
        target: Any = server.url
        if server.command:
            command, *arguments = server.command
            target = mcp.StdioServerParameters(
                command=command, args=arguments, env=dict(server.env) or None, cwd=server.folder
            )
        try:
            async with asyncio.timeout(server.start_timeout_s) as limit:
                async with mcp.Client(target, read_timeout_seconds=server.timeout_s) as client:
                    limit.reschedule(None)
                    self._client = client
                    self._ready.set()
                    await self._end.wait()
        except asyncio.CancelledError:
            self._failure = self._failure or "the connection was cancelled"
            raise
        except TimeoutError:
            self._failure = f"it did not start within {server.start_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  # whatever the package raises ends episodes
            self._failure = self._failure or _first_reason(error)
        finally:
            self._ready.set()


@dataclass(frozen=True)
class McpServer:
    """Server of an entry `mcp` of `tools`."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server over stdio."""
    url: str = ""
    """Address of a server over streamable HTTP."""
    env: tuple[tuple[str, str], ...] = ()
    """Further environment variables of the program."""
    folder: str | None = None
    """Folder in which the program starts."""
    tools: tuple[str, ...] = ()
    """Names of its tools that the policy gets; empty: all."""
    shared: bool = True
    """Whether the episodes of a process share one connection. False for servers that keep state:
    each episode then has a server, or a session, of its own."""
    start_timeout_s: float = 30.0
    """Time limit for the start and the first exchange, in seconds."""
    timeout_s: float = 20.0
    """Time limit for one answer, in seconds."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless exactly one of `command` and `url` is set."""
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                "mcp: set either `command` (a list: program and arguments) or `url` (of a server "
                "with streamable HTTP)"
            )

    @property
    def shown(self) -> str:
        return self.url or " ".join(self.command)


def server_of(settings: Mapping[str, Any]) -> McpServer:
    """Return the server that the settings of an entry `mcp` describe.

    Raises:
        ConfigError: a setting is unknown, or of a wrong kind.
    """
    known = McpServer.__dataclass_fields__
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(f"mcp: unknown setting {unknown[0]!r} (known: {', '.join(known)})")
    found = dict(settings)
    for key in ("command", "tools"):
        if isinstance(found.get(key), str):
            raise ConfigError(f"mcp: {key} must be a list of texts, found {found[key]!r}")
        found[key] = tuple(map(str, found.get(key, ())))
    found["env"] = tuple(sorted((str(k), str(v)) for k, v in dict(found.get("env", {})).items()))
    return McpServer(**found)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[McpServer, Connection]]
_shared = weakref.WeakKeyDictionary()


@dataclass
class McpKit:
    """Tools of one server in one episode."""

    server: McpServer
    _own: Connection | None = field(default=None, init=False)

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Connect if nobody has; return the tools.

        Raises:
            ConfigError: the server has no tool of a name that the settings want.
            EnvironmentFailedError: the server does not start or does not answer.
        """
        connection = self._connection()
        client = await connection.opened()
        listed: dict[str, Any] = {}
        cursor = None
        while True:
            page = await _answered(connection, client.list_tools(cursor=cursor))
            listed |= {each.name: each for each in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        missing = [name for name in self.server.tools if name not in listed]
        if missing:
            raise ConfigError(
                f"mcp: the server {self.server.shown} has no tool {missing[0]!r} (it has: "
                f"{', '.join(sorted(listed))})"
            )
        chosen = self.server.tools or tuple(listed)
        return [
            Tool(
                name,
                " ".join((listed[name].description or "").split()),
                listed[name].input_schema,
                partial(_call, connection, name),
            )
            for name in chosen
        ]

    async def close(self) -> None:
        """End the connection if it is the episode's own."""
        if self._own is not None:
            await self._own.close()

    def _connection(self) -> Connection:
        """Return the connection to use: the one that all episodes of this event loop share, or one
        of this episode's own."""
        if not self.server.shared:
            self._own = Connection(self.server)
            return self._own
        known = _shared.setdefault(asyncio.get_running_loop(), {})
        connection = known.get(self.server)
        if connection is None or not connection.usable:
            connection = known[self.server] = Connection(self.server)
        return connection


async def close_shared() -> None:
    """End the connections that episodes on the running event loop share."""
    known = _shared.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(each.close() for each in known.values()))


async def _call(connection: Connection, name: str, arguments: Mapping[str, Any]) -> str:
    """Call a tool of a server; return the text of its result.

    Raises:
        ToolError: the tool failed, or the arguments are wrong.
        EnvironmentFailedError: the server does not answer.
    """
    client = await connection.opened()
    result = await _answered(connection, client.call_tool(name, dict(arguments)))
    texts = [_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    said = "\n".join(texts)
    if result.is_error:
        raise ToolError(said or "the tool failed")
    return said


async def _answered(connection: Connection, answer: Any) -> Any:
    """Await an answer of a server. An error that the server itself tells, such as wrong arguments,
    is the policy's to read; a connection that is gone ends the episode as failed. The first is a
    ToolError, the second an EnvironmentFailedError."""
    mcp = agent_package("mcp", "mcp", "mcp")
    try:
        return await answer
    except mcp.MCPError as error:
        if error.error.code in _FAULTS or error.error.message == _NO_ANSWER:
            connection.broken(error.error.message)
            raise EnvironmentFailedError(
                f"MCP server {connection.server.shown}: {error.error.message}"
            ) from None
        raise ToolError(error.error.message) from None
    except (OSError, RuntimeError) as error:
        connection.broken(str(error))
        raise EnvironmentFailedError(f"MCP server {connection.server.shown}: {error}") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "anyio":
            raise
        connection.broken("it has closed the connection")
        raise EnvironmentFailedError(
            f"MCP server {connection.server.shown}: it has closed the connection"
        ) from None


_FAULTS = (-32000, -32001)
"""Codes of errors of JSON-RPC that are not the policy's doing: closed connection, time limit.
Internal errors are not among them: the server has answered, and answers the calls of others."""
_NO_ANSWER = "Server returned an error response"
"""Text of the internal error that the package makes of a status of HTTP, such as that of a gateway
whose server is gone."""


def _text(block: Any) -> str:
    """Return a block of a result as text; blocks of other kinds are only named."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type}]"


def _first_reason(error: BaseException) -> str:
    """Return the first reason in a group of exceptions."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
