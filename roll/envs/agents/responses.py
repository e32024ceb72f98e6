"""The form of `/v1/responses`: its requests, and the answers of the policy in it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from roll.core.types import Message
from roll.envs.agents.answers import Answer, arguments_of
from roll.envs.agents.requests import (
    ChatRequest,
    RequestError,
    call_of,
    encodable,
    flag_of,
    limit_of,
    refuse,
    refuse_form,
    require_size,
    short,
    text_of,
    tools_of,
    with_names,
)

REFUSED = {
    "previous_response_id": "",
    "conversation": "",
    "background": False,
    "max_tool_calls": None,
    "top_logprobs": 0,
    "prompt": None,
}
"""Keys of a request that must not have another value than this: an agent sends all that was said,
and runs the tools itself."""
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")


def request_of(body: Any) -> ChatRequest:
    """Read the body of `POST /v1/responses`; see `ChatRequest.of`.

    Raises:
        RequestError: the body is no such request, or asks for what the endpoint does not have.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("input"), str | list):
        raise RequestError("the body must be a JSON object with `input`, a text or a list")
    refuse(body, REFUSED)
    include = body.get("include")
    if isinstance(include, list) and _LOGPROBS in include:
        raise RequestError(f"`include` = {short(include)} is not supported; leave it out")
    form = body.get("text")
    refuse_form("text.format", form.get("format") if isinstance(form, Mapping) else form)
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    instructions = body.get("instructions")
    said = [Message("system", text_of(instructions))] if instructions else []
    for item in items:
        said = _with(said, item)
    require_size("input", said)
    limit = limit_of(body, "max_output_tokens")
    tools = tools_of(body, nested=False)
    several = flag_of(body, "parallel_tool_calls") is not False
    stream = bool(flag_of(body, "stream"))
    return ChatRequest(with_names(said), (), limit, stream, tools, several)


def _with(said: list[Message], item: Any) -> list[Message]:
    """Return the messages with one more item: a message, a call or its result.

    An answer with text and calls comes back as several items, which are one message here.
    """
    if not isinstance(item, Mapping):
        raise RequestError(f"an item of `input` must be an object, found {short(item)}")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return said
    if kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
        if said and said[-1].role == "assistant":
            last = said[-1]
            return [*said[:-1], Message(last.role, last.content, calls=(*last.calls, call))]
        return [*said, Message("assistant", "", calls=(call,))]
    if kind == "function_call_output":
        content = text_of(item.get("output"), _TEXTS)
        return [*said, Message("tool", content, call_id=str(item.get("call_id") or ""))]
    if kind != "message" or not isinstance(item.get("role"), str):
        raise RequestError(f"`input` has an item of type {kind!r:.40}, which is not supported")
    role = "system" if item["role"] == "developer" else item["role"]
    encodable(role, "the role of a message")
    return [*said, Message(role, text_of(item.get("content"), _TEXTS))]


def body_of(answer: Answer, model: str) -> dict[str, Any]:
    """Return the body of a response; `model` is the name of the model."""
    cut = answer.finish == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": list(_items(answer)),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": answer.context_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.context_tokens + answer.tokens,
        },
    }


def events(answer: Answer, model: str) -> Iterator[bytes]:
    """Yield the events of a streamed response; each item comes in one piece."""
    whole = body_of(answer, model)
    begun = whole | {"status": "in_progress", "output": [], "incomplete_details": None}
    told: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for place, item in enumerate(whole["output"]):
        told += _events_of(place, item)
    end = "response.incomplete" if answer.finish == "length" else "response.completed"
    told.append({"type": end, "response": whole})
    for number, event in enumerate(told):
        text = json.dumps(event | {"sequence_number": number})
        yield f"event: {event['type']}\ndata: {text}\n\n".encode()


def _events_of(place: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {"output_index": place, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    begun = item | empty | {"status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        where |= {"content_index": 0}
        yield {"type": "response.content_part.added", **where, "part": part | {"text": ""}}
        delta = {"delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.delta", **where, **delta}
        done = {"text": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **where, **done}
        yield {"type": "response.content_part.done", **where, "part": part}
    else:
        arguments = {"arguments": item["arguments"], "name": item["name"]}
        delta = {"delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.delta", **where, **delta}
        yield {"type": "response.function_call_arguments.done", **where, **arguments}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield the items of an answer: its text, unless there are calls alone, and its calls."""
    if answer.text or not answer.calls:
        yield {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if answer.finish == "length" else "completed",
            "content": [{"type": "output_text", "text": answer.text, "annotations": []}],
        }
    for call in answer.calls:
        yield {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments_of(call),
        }
