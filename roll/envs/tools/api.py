"""`Tool` and `Toolkit`: a tool, and the tools of an episode."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from roll.envs.api import Hearing


class ToolError(Exception):
    """Error that the policy made and can read: its message becomes the result of the call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call.

    Example: Tool("now", "Tells the time.", {"type": "object", "properties": {}}, tell)
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[[Mapping[str, Any]], Awaitable[Any]]
    """Function that runs it with its arguments. A result that is no text is shown as JSON.

    `ToolError`, and any other exception of a tool in Python, is told to the policy. A `RollError`
    is a fault of the machinery: the episode fails and is not trained on.
    """
    ends: bool = False
    """True if the call ends the episode, and its result is the answer."""
    unlimited: bool = False
    """True if the time limit of calls does not hold for it: it only waits for the machinery of the
    run, which has limits of its own."""

    @property
    def description_for_templates(self) -> dict[str, Any]:
        """Description of the tool as chat templates take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


class Toolkit(Protocol):
    """Tools of one episode, with what they keep between calls."""

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Begin an episode; return the tools. `options` are the columns of the task's row."""
        ...

    async def close(self) -> None:
        """End the episode; called once, also if `open` failed."""
        ...


@runtime_checkable
class ToldToolkit(Protocol):
    """Toolkit that is told about the run."""

    def listen(self, hearing: Hearing) -> None:
        """Take note of how the policy is heard, and of the corpora of the run. It is called before
        `open`, and must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Stateless:
    """Tools that keep nothing."""

    tools: tuple[Tool, ...]

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Return the tools."""
        return self.tools

    async def close(self) -> None:
        """Do nothing."""


def shown(result: Any) -> str:
    """Return the result of a tool as text."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)
