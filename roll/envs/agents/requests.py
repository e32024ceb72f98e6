"""Requests of agents at `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.core.types import Message, ToolCall

REFUSED = {"n": 1, "logprobs": False, "functions": []}
"""Keys of a request that must not have another value than this."""


class RequestError(Exception):
    """Error: the endpoint cannot serve a request; the message goes to the client."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Request of an agent."""

    messages: tuple[Message, ...]
    stop: tuple[str, ...]
    max_new_tokens: int | None
    stream: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools that the policy may call, as chat templates take them."""

    @classmethod
    def of(cls, body: Any) -> ChatRequest:
        """Read the body of `POST /v1/chat/completions`.

        Settings of sampling, such as `temperature`, have no effect: the policy is sampled as the
        run samples it, or its log-probs would be those of another distribution.

        Raises:
            RequestError: the body is no such request, or asks for what the endpoint does not have.
        """
        if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list):
            raise RequestError("the body must be a JSON object with a list `messages`")
        refuse(body, REFUSED)
        stop = body.get("stop") or ()
        messages = with_names([_message(each) for each in body["messages"]])
        if not messages:
            raise RequestError("`messages` is empty")
        return cls(
            messages,
            (stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            limit_of(body, "max_completion_tokens", "max_tokens"),
            bool(body.get("stream")),
            tools_of(body, nested=True),
        )


def refuse(body: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raise RequestError if a key has a value that the endpoint cannot serve."""
    for key, value in only.items():
        if body.get(key) not in (None, value):
            raise RequestError(f"`{key}` = {json.dumps(body[key])[:80]} is not supported")


def limit_of(body: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first limit of tokens that a request sets; None without one."""
    limit = next((body[key] for key in keys if body.get(key)), None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RequestError(f"`{keys[-1]}` must be a whole number above 0, found {limit!r}")
    return limit


def tools_of(body: Mapping[str, Any], *, nested: bool) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a request as chat templates take them.

    Args:
        body: body of the request.
        nested: whether a tool is described under its key `function`, or beside its `type`.
    """
    tools, choice = body.get("tools") or (), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"`tool_choice` = {json.dumps(choice)[:80]} is not supported: the policy decides"
        )
    found = []
    for tool in () if choice == "none" else tools:
        key = "function" if nested else "name"
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not tool.get(key):
            raise RequestError(
                f"`tools` may hold functions only, found {json.dumps(tool)[:80]}; let the agent "
                "run its tools itself"
            )
        function = dict(tool["function"]) if nested else {k: tool.get(k) for k in _FUNCTION}
        function = {key: value for key, value in function.items() if key in _FUNCTION}
        found.append({"type": "function", "function": function})
    return tuple(found)


_FUNCTION = ("name", "description", "parameters")
"""Keys of a function that are shown to the policy."""


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the content of a message: a text, or a list of texts of these types."""
    if isinstance(content, list):
        found = {part.get("type") for part in content if isinstance(part, Mapping)}
        if found - set(kinds) or len(found) == 0:
            raise RequestError(
                f"a message has content of type {sorted(map(str, found))}; only text"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"content must be text, found {type(content).__name__}")
    return content


def with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages; results of tools get the name of the tool that was called."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return tuple(
        Message(each.role, each.content, names.get(each.call_id, each.name), each.call_id)
        if each.role == "tool"
        else each
        for each in messages
    )


def call_of(id: Any, name: Any, arguments: Any) -> ToolCall:
    """Return a call that an agent sends back."""
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise RequestError("a call must have a name and arguments, both of them text")
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        read = arguments
    return ToolCall(name, read if isinstance(read, dict) else arguments, str(id or ""))


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RequestError(f"a message must be {{role, content}}, found {json.dumps(value)[:80]}")
    role = "system" if value["role"] == "developer" else value["role"]
    content = text_of(value.get("content"))
    if role == "tool":
        return Message(role, content, call_id=str(value.get("tool_call_id") or ""))
    calls = []
    for call in value.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"a call must be of a function, found {json.dumps(call)[:80]}")
        calls.append(call_of(call.get("id"), function.get("name"), function.get("arguments")))
    return Message(role, content, calls=tuple(calls))
