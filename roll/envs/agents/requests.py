"""Requests of agents at `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.core.types import Message, ToolCall
from roll.envs.api import MAX_OBSERVATION_CHARS

REFUSED = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "functions": [],
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
}
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
    parallel: bool = True
    """Whether a turn may have several calls."""
    tells_tokens: bool = False
    """Whether a stream is to end with the numbers of tokens."""

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
        refuse_form("response_format", body.get("response_format"))
        options = body.get("stream_options")
        if not isinstance(options, Mapping | None):
            raise RequestError(f"`stream_options` must be an object, found {short(options)}")
        messages = with_names([_message(each) for each in body["messages"]])
        require_size("messages", messages)
        return cls(
            messages,
            stop_of(body),
            limit_of(body, "max_completion_tokens", "max_tokens"),
            bool(flag_of(body, "stream")),
            tools_of(body, nested=True),
            flag_of(body, "parallel_tool_calls") is not False,
            bool(flag_of(options or {}, "include_usage")),
        )


def require_size(key: str, messages: Sequence[Message]) -> None:
    """Raise RequestError if there are no messages, or so long ones that all other requests of the
    worker would wait for their tokens."""
    if not messages:
        raise RequestError(f"`{key}` is empty")
    size = sum(len(message.content) for message in messages)
    if size > MAX_OBSERVATION_CHARS:
        raise RequestError(
            f"`{key}` may have {MAX_OBSERVATION_CHARS:,} characters in all, found {size:,}; "
            "shorten it"
        )


def refuse(body: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raise RequestError if a key has a value that the endpoint cannot serve."""
    for key, value in only.items():
        if body.get(key) not in (None, value):
            raise RequestError(f"`{key}` = {short(body[key])} is not supported; leave it out")


def refuse_form(key: str, form: Any) -> None:
    """Raise RequestError if an answer is to have another form than text.

    Args:
        key: key of the form, for the message.
        form: its value; None for none.
    """
    if form is not None and not (isinstance(form, Mapping) and form.get("type") == "text"):
        raise RequestError(
            f"`{key}` = {short(form)} is not supported: nothing keeps the policy to a form; leave "
            "it out, ask for the form in a message, and let the agent check the answer"
        )


def limit_of(body: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first limit of tokens that a request sets; None without one. RequestError if a
    limit is no whole number above 0."""
    found = None
    for key in keys:
        limit = body.get(key)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise RequestError(f"`{key}` must be a whole number above 0, found {short(limit)}")
        found = limit if found is None else found
    return found


def stop_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the strings that stop an answer: `stop` is a text, a list of texts, or null for none;
    RequestError for anything else."""
    value = body.get("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise RequestError(f"`stop` must be a text or a list of texts, found {short(value)}")
    return tuple(encodable(each, "`stop`") for each in texts if each)


def flag_of(body: Mapping[str, Any], key: str) -> bool | None:
    """Return a setting that is true, false or missing (None); RequestError for anything else."""
    flag = body.get(key)
    if not isinstance(flag, bool | None):
        raise RequestError(f"`{key}` must be true or false, found {short(flag)}")
    return flag


def encodable(text: str, where: str) -> str:
    """Return the text; RequestError if it has half of a surrogate pair, which has no UTF-8 and so
    no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} has {text[error.start : error.end]!a}, half of a surrogate pair; send whole "
            "characters"
        ) from None
    return text


def short(value: Any) -> str:
    """Return the beginning of a value as JSON, for messages."""
    return json.dumps(value)[:80]


def tools_of(body: Mapping[str, Any], *, nested: bool) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a request as chat templates take them.

    Args:
        body: body of the request.
        nested: whether a tool is described under its key `function`, or beside its `type`.
    """
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list):
        raise RequestError(f"`tools` must be a list, found {short(tools)}")
    if choice not in (None, "auto", "none"):
        raise RequestError(f"`tool_choice` = {short(choice)} is not supported: the policy decides")
    found = []
    for tool in () if choice == "none" else tools:
        key = "function" if nested else "name"
        known = isinstance(tool, Mapping) and tool.get("type") == "function"
        if not known or not isinstance(tool.get(key), Mapping if nested else str):
            raise RequestError(
                f"`tools` may hold functions only, found {short(tool)}; let the agent run its "
                "tools itself"
            )
        function = dict(tool["function"]) if nested else {k: tool.get(k) for k in _FUNCTION}
        if not isinstance(function.get("name"), str):
            raise RequestError(f"a function must have a name, found {short(tool)}")
        encodable(json.dumps(function, ensure_ascii=False), "a tool")
        function = {key: value for key, value in function.items() if key in _FUNCTION}
        found.append({"type": "function", "function": function})
    return tuple(found)


_FUNCTION = ("name", "description", "parameters")
"""Keys of a function that are shown to the policy."""


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return the content of a message: a text, or a list of texts of these types."""
    if isinstance(content, list):
        content = "".join(_text_of_part(part, kinds) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"content must be text, found {type(content).__name__}")
    return encodable(content, "a message")


def _text_of_part(part: Any, kinds: Sequence[str]) -> str:
    """Return the text of a part of a message; RequestError if it is no text of these types."""
    known = isinstance(part, Mapping) and part.get("type") in kinds
    text = part.get("text") if known else None
    if not isinstance(text, str):
        raise RequestError(
            f"a part of a message must be {{type: text, text}}, found {short(part)}; only text"
        )
    return text


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
    encodable(name + arguments, "a call")
    try:
        read = json.loads(arguments or "{}")
        encodable(json.dumps(read, ensure_ascii=False), "a call")
    except (ValueError, RecursionError):
        read = arguments
    return ToolCall(name, read if isinstance(read, dict) else arguments, str(id or ""))


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RequestError(f"a message must be {{role, content}}, found {short(value)}")
    role = "system" if value["role"] == "developer" else value["role"]
    encodable(role, "the role of a message")
    content = text_of(value.get("content"))
    if role == "tool":
        return Message(role, content, call_id=str(value.get("tool_call_id") or ""))
    calls = []
    sent = value.get("tool_calls") or []
    if not isinstance(sent, list):
        raise RequestError(f"`tool_calls` must be a list, found {short(sent)}")
    for call in sent:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"a call must be of a function, found {short(call)}")
        calls.append(call_of(call.get("id"), function.get("name"), function.get("arguments")))
    return Message(role, content, calls=tuple(calls))
