"""Answers of the policy to an agent, in the form of `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll.core.types import ToolCall
from roll.envs.agents.requests import ChatRequest
from roll.envs.tools.arguments import typed_arguments
from roll.envs.tools.formats.api import Call, Format

Finish = Literal["stop", "length"]
ID_CHARACTERS = 9
"""Length of the id of a call; chat templates of Mistral accept no other."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer that an agent gets for a request."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"
    malformed: int = 0
    """Number of calls that could not be read, or were too many; they stay in the text."""
    context_tokens: int = 0
    """Number of tokens before the turn."""
    tokens: int = 0
    """Number of tokens of the turn."""
    tells_tokens: bool = False
    """Whether a stream of `/v1/chat/completions` ends with these numbers."""


def answer_of(said: str, request: ChatRequest, format: Format | None, *, cut: bool) -> Answer:
    """Return the answer that a turn of the policy is.

    A turn with a call that cannot be read is text, and so is one with more calls than the request
    allows, and a turn that was cut: no part of it may be taken for a whole call.

    Args:
        said: what the policy wrote.
        request: request of the agent. The strings that end an answer are no part of it; arguments
            that the format writes as text get the types that the tools want.
        format: format of calls; None if the agent offers no tools.
        cut: whether the turn was cut.
    """
    text = shown(said, request.stop)
    if format is None or cut:
        return Answer(text, finish="length" if cut else "stop")
    parsed = format.parse(text)
    if not parsed.calls:
        return Answer(parsed.text)
    calls = [_call(call, request) for call in parsed.calls if isinstance(call, Call)]
    made = tuple(call for call in calls if call is not None)
    made = made if request.parallel else made[:1]
    malformed = len(parsed.calls) - len(made)
    return Answer(text, malformed=malformed) if malformed else Answer(parsed.text, made)


def _call(call: Call, request: ChatRequest) -> ToolCall | None:
    """Return a call with the types of its tool and a new id; None if a client cannot get it: it
    cannot be written as JSON, or has half of a surrogate pair, which has no UTF-8."""
    functions = (tool["function"] for tool in request.tools)
    schema = next((each.get("parameters") for each in functions if each["name"] == call.name), None)
    arguments = typed_arguments(call, schema) if isinstance(schema, Mapping) else call.arguments
    try:
        json.dumps([call.name, dict(arguments)], sort_keys=True, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(call.name, arguments, uuid.uuid4().hex[:ID_CHARACTERS])


def shown(text: str, stop: Sequence[str]) -> str:
    """Return the text of an answer as the client gets it: without the string that stopped it."""
    ends = [place for each in stop if each and (place := text.find(each)) >= 0]
    return text[: min(ends, default=len(text))]


def response(answer: Answer, model: str) -> dict[str, Any]:
    """Return the body of a response; `model` is the name of the model."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": _calls(answer)}
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
    return _head("chat.completion", model) | {"choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, model: str) -> Iterator[bytes]:
    """Yield the events of a streamed response; the text comes in one piece."""
    head = _head("chat.completion.chunk", model)
    delta: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(_calls(answer))]
    for part, end in ((delta, None), ({}, _finish(answer))):
        choice = {"index": 0, "delta": part, "finish_reason": end}
        yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
    if answer.tells_tokens:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(answer)})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments))


def _usage(answer: Answer) -> dict[str, int]:
    whole = answer.context_tokens + answer.tokens
    return {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": whole,
    }


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.finish


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_of(call)},
        }
        for call in answer.calls
    ]


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
