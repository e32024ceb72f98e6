"""Running of calls: every call gets a result, and every mistake of the policy is told to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.errors import nearest
from roll.core.errors import RollError
from roll.core.threads.bounded import gives_up
from roll.core.threads.user_errors import described, passable
from roll.envs.tools.api import Tool, ToolError, shown
from roll.envs.tools.arguments import typed_arguments
from roll.envs.tools.formats.api import Call, Malformed


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one call."""

    name: str
    """Name of the tool, or of the one that the policy named."""
    text: str
    failed: bool = False
    """True if the policy made a mistake: the text says which."""
    ends: bool = False
    """True if the call ends the episode, with the text as the answer."""


async def run_calls(
    calls: Sequence[Call | Malformed], tools: Mapping[str, Tool], timeout_s: float
) -> list[Result]:
    """Run the calls of a turn at the same time; return their results in the same order.

    Args:
        calls: calls of a turn.
        tools: tools by name.
        timeout_s: time limit of each call, in seconds, unless its tool is `unlimited`. The policy
            is told of a call that takes longer.

    Raises:
        RollError: the machinery of a tool does not work; see `Tool.call`.
    """
    return list(await asyncio.gather(*(_run(call, tools, timeout_s) for call in calls)))


async def _run(call: Call | Malformed, tools: Mapping[str, Tool], timeout_s: float) -> Result:
    """Run one call. A mistake of the policy or a failure of the tool becomes a `Result` with
    `failed`; only RollError is raised."""
    if isinstance(call, Malformed):
        return Result(call.name or "unknown", f"Error: {call.reason}", failed=True)
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools)
        guess = nearest(call.name, tools)
        told = f"Error: there is no tool {call.name!r}{guess} (there are: {known})"
        return Result(call.name, told, failed=True)
    try:
        arguments = typed_arguments(call, tool.parameters)
        _check_characters(arguments)
        limit_s = None if tool.unlimited else timeout_s
        value = await asyncio.wait_for(_call(tool, arguments), limit_s)
    except ToolError as error:
        return Result(tool.name, f"Error: {error}", failed=True)
    except TimeoutError:
        return Result(tool.name, f"Error: it took longer than {timeout_s:g} s", failed=True)
    except RollError:
        raise
    except Exception as error:  # noqa: BLE001  # the tool's own words, for the policy to read
        return Result(tool.name, f"Error: {described(error)}", failed=True)
    return Result(tool.name, shown(value), ends=tool.ends)


def _check_characters(arguments: Mapping[str, Any]) -> None:
    """Raise ToolError if arguments have half of a surrogate pair. It has no UTF-8, and a connection
    to a server, which other episodes use, may break at it."""
    try:
        json.dumps(arguments, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start : error.end]
        raise ToolError(
            f"the arguments have {found!a}, half of a surrogate pair; write whole characters"
        ) from None


async def _call(tool: Tool, arguments: dict[str, Any]) -> Any:
    """Call a tool. Turn what would end the event loop, such as SystemExit, and a CancelledError
    that the tool itself raises, which would pass for the end of the run, into other errors."""
    try:
        return await tool.call(arguments)
    except asyncio.CancelledError as error:
        if gives_up():
            raise
        raise ToolError(f"CancelledError: {error}") from None
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        raise passable(error) from error
