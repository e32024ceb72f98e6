"""Tools in a conversation: their descriptions, and their results, for every chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.core.types import Message, ToolCall

PROBE_ID = "000000001"
"""Id of a call where none is given. Templates of Mistral want nine letters or digits."""
PROBE_NAME = "probe_qwkz"
"""Name of a tool, in no template, that finds out what a template does with tools."""
DESCRIPTION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
"""Description of this tool."""


def with_description(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], role: str
) -> tuple[Message, ...]:
    """Return the messages with a description of the tools in the first message, for templates that
    do not show tools.

    Args:
        messages: the opening of a conversation.
        tools: descriptions of tools.
        role: role of the message that holds the description; one is added if the first has another.
    """
    listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools)
    text = f"You may call these tools:\n{listed}"
    if messages and messages[0].role == role:
        both = (messages[0].content, text) if role == "system" else (text, messages[0].content)
        return (replace(messages[0], content="\n\n".join(both)), *messages[1:])
    return (Message(role, text), *messages)


def from_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with the results of tools as messages of the user, for templates that do
    not know the role `tool`; results that follow each other share one message."""
    found: list[Message] = []
    before = ""
    for message in messages:
        said = message
        if message.role == "tool":
            said = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
            if before == "tool":
                said = replace(said, content=f"{found.pop().content}\n{said.content}")
        found.append(said)
        before = message.role
    return tuple(found)


def with_calls_as_text(message: Message) -> Message:
    """Return a message whose calls are part of its text, for templates that do not know calls."""
    if not message.calls:
        return message
    told = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    marked = (f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in told)
    texts = ([message.content] if message.content else []) + list(marked)
    return Message(message.role, "\n".join(texts))


def callers(messages: Sequence[Message], answer: str) -> Iterator[tuple[Message, int]]:
    """Yield messages of the assistant in whose place a template may render results of tools.

    Templates differ in what they insist on: as many calls as there are results or just one,
    arguments as an object or as JSON text. At last comes a message without a call.

    Args:
        messages: what follows, results of tools first.
        answer: text that stands for what the policy wrote; each call has it as an argument.

    Yields:
        The message, and how often the answer is in it.
    """
    results = [each for each in messages if each.role == "tool"]
    for several in (results, results[:1]):
        for arguments in ({"answer": answer}, json.dumps({"answer": answer})):
            calls = tuple(
                ToolCall(each.name or PROBE_NAME, arguments, each.call_id or PROBE_ID)
                for each in several
            )
            yield Message("assistant", "", calls=calls), len(calls)
    yield Message("assistant", answer), 1
