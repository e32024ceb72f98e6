"""Conversations of an agent: which of them a request continues, and what its answer looks like."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.core.types import Message

REFUSED = {"n": 1, "logprobs": False, "tools": [], "functions": []}
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
        for key, only in REFUSED.items():
            if body.get(key) not in (None, only):
                raise RequestError(f"`{key}` = {_short(body[key])} is not supported")
        stream = body.get("stream")
        if not isinstance(stream, bool | None):
            raise RequestError(f"`stream` must be true or false, found {_short(stream)}")
        messages = tuple(_message(each) for each in body["messages"])
        if not messages:
            raise RequestError("`messages` is empty")
        limits = [_limit(body, key) for key in ("max_completion_tokens", "max_tokens")]
        limit = next((each for each in limits if each is not None), None)
        return cls(messages, _stop(body.get("stop")), limit, bool(stream))


@dataclass(frozen=True, slots=True)
class _Said:
    """Message of a conversation, in each form in which an agent may send it again."""

    role: str
    forms: frozenset[str]

    def is_repeated_by(self, message: Message) -> bool:
        """Return whether an agent sends this message again."""
        content = message.content.strip() if self.role == "assistant" else message.content
        return message.role == self.role and content in self.forms


@dataclass
class Conversations:
    """Conversations of one episode, each with all of its messages so far.

    Agents strip white space from answers before they send them again, and some put the string back
    that stopped the answer. Such an answer is the same, for its tokens are kept as they are.
    """

    _known: list[list[_Said]] = field(default_factory=list)

    def place(self, messages: Sequence[Message]) -> tuple[int, Sequence[Message], bool]:
        """Find the conversation that a request continues: the one with the most messages.

        A request that continues none begins a new one: a sub-agent, a repetition, or an agent that
        has rewritten its messages.

        Returns:
            Number of the conversation, the messages that are new in it, and whether it is new.
        """
        best, longest = -1, 0
        for number, known in enumerate(self._known):
            size = len(known)
            if longest < size < len(messages) and all(
                said.is_repeated_by(message)
                for said, message in zip(known, messages[:size], strict=True)
            ):
                best, longest = number, size
        new = messages[longest:]
        said = [_said(message.role, message.content) for message in new]
        if best < 0:
            self._known.append(said)
            return len(self._known) - 1, new, True
        self._known[best] += said
        return best, new, False

    def answered(self, number: int, answer: str, whole: str) -> None:
        """Add the answer of the policy to a conversation.

        Args:
            number: number of the conversation.
            answer: text that the agent got.
            whole: text that the policy wrote, with the string that stopped it.
        """
        self._known[number].append(_said("assistant", answer, whole))


def _said(role: str, *forms: str) -> _Said:
    """Return a message with the texts as which an agent may send it again."""
    return _Said(role, frozenset(f.strip() if role == "assistant" else f for f in forms))


def shown(text: str, stop: Sequence[str]) -> str:
    """Return the text of an answer as the client gets it: without the string that stopped it."""
    ends = [place for each in stop if each and (place := text.find(each)) >= 0]
    return text[: min(ends, default=len(text))]


def response(text: str, finish: str, model: str) -> dict[str, Any]:
    """Return the body of a response.

    Args:
        text: content of the answer.
        finish: `stop` or `length`.
        model: name of the model.
    """
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return _head("chat.completion", model) | {"choices": [choice], "usage": usage}


def chunks(text: str, finish: str, model: str) -> Iterator[bytes]:
    """Yield the events of a streamed response (see `response`); the text comes in one piece."""
    head = _head("chat.completion.chunk", model)
    delta = {"role": "assistant", "content": text}
    for part, end in ((delta, None), ({}, finish)):
        choice = {"index": 0, "delta": part, "finish_reason": end}
        yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    """Return the fields that all responses have; `kind` is the value of `object`."""
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _stop(value: Any) -> tuple[str, ...]:
    """Return the strings that stop an answer: a text, a list of texts, or null for none;
    RequestError for anything else."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise RequestError(f"`stop` must be a text or a list of texts, found {_short(value)}")
    return tuple(_encodable(each, "`stop`") for each in texts if each)


def _limit(body: Mapping[str, Any], key: str) -> int | None:
    """Return a limit of tokens; None if the request has none. RequestError if it is no whole number
    above 0."""
    limit = body.get(key)
    if limit is None:
        return None
    if type(limit) is not int or limit < 1:
        raise RequestError(f"`{key}` must be a whole number above 0, found {_short(limit)}")
    return int(limit)


def _encodable(text: str, where: str) -> str:
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


def _short(value: Any) -> str:
    """Return the beginning of a value as JSON, for messages."""
    return json.dumps(value)[:80]


def _message(value: Any) -> Message:
    """Read a message, whose content is a text or a list of texts; RequestError if it is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RequestError(f"a message must be {{role, content}}, found {_short(value)}")
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"content must be text, found {type(content).__name__}")
    if value.get("tool_calls"):
        raise RequestError("messages with `tool_calls` are not supported")
    role = "system" if value["role"] == "developer" else value["role"]
    return Message(_encodable(role, "the role of a message"), _encodable(content, "a message"))


def _text_of(part: Any) -> str:
    """Return the text of a part of a message; RequestError if it is no text."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"a part of a message must be {{type: text, text}}, found {_short(part)}; only text"
        )
    return text
