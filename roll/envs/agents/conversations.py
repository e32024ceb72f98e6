"""Conversations of an agent: which of them a request continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.core.types import Message, ToolCall
from roll.envs.agents.answers import Answer
from roll.envs.agents.requests import ChatRequest


@dataclass(frozen=True, slots=True)
class _Said:
    """Message of a conversation, in each form in which an agent may send it again."""

    role: str
    forms: frozenset[str]

    def is_repeated_by(self, message: Message) -> bool:
        """Return whether an agent sends this message again."""
        return message.role == self.role and _form(message) in self.forms


@dataclass
class _Conversation:
    """Messages of a conversation, and the tools that it began with."""

    tools: str
    said: list[_Said]


@dataclass
class Conversations:
    """Conversations of one episode, each with all of its messages so far.

    Agents strip white space from answers before they send them again, and some put the string back
    that stopped the answer, or leave out the text before calls of tools. Such an answer is the
    same, for its tokens are kept as they are.
    """

    _known: list[_Conversation] = field(default_factory=list)

    def place(self, request: ChatRequest) -> tuple[int, Sequence[Message], bool]:
        """Find the conversation that a request continues: the one with the most messages.

        A request that continues none begins a new one: a sub-agent, a repetition, an agent that
        has rewritten its messages, or one that now has other tools.

        Returns:
            Number of the conversation, the messages that are new in it, and whether it is new.
        """
        messages, tools = request.messages, json.dumps(request.tools, sort_keys=True)
        best, longest = -1, 0
        for number, known in enumerate(self._known):
            size = len(known.said)
            if known.tools != tools or not longest < size < len(messages):
                continue
            if all(
                said.is_repeated_by(message)
                for said, message in zip(known.said, messages[:size], strict=True)
            ):
                best, longest = number, size
        new = messages[longest:]
        said = [_Said(message.role, frozenset([_form(message)])) for message in new]
        if best < 0:
            self._known.append(_Conversation(tools, said))
            return len(self._known) - 1, new, True
        self._known[best].said += said
        return best, new, False

    def answered(self, number: int, answer: Answer, whole: str) -> None:
        """Add the answer of the policy to a conversation.

        Args:
            number: number of the conversation.
            answer: what the agent got.
            whole: text that the policy wrote, with the string that stopped it.
        """
        texts = {answer.text, "" if answer.calls else whole}
        forms = {_form(Message("assistant", text, calls=answer.calls)) for text in texts}
        self._known[number].said.append(_Said("assistant", frozenset(forms)))


def _form(message: Message) -> str:
    """Return what two messages have in common that are the same for an agent. The ids of calls are
    not part of it."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [[call.name, _arguments(call)] for call in message.calls]
    return json.dumps([content, calls], sort_keys=True)


def _arguments(call: ToolCall) -> object:
    return call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
