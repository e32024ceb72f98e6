"""Tokens of a conversation that grows turn by turn, without ever tokenizing a word of the policy.

What the policy wrote is kept as the tokens that the engine sampled. Only the messages between two
turns are rendered. The chat template renders them behind an answer that stands for all answers, and
what follows this answer is what belongs behind the tokens of the policy. Results of tools are
rendered behind a call that stands for all calls.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roll.config.sections.data import TemplateConfig
from roll.core.completion import TOKEN_TYPE
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.end_mark import end_mark
from roll.data.chat.inner_tokens import inner_tokens
from roll.data.chat.templates import PromptTokenizer, apply_template
from roll.data.chat.tool_messages import (
    DESCRIPTION,
    PROBE_ID,
    PROBE_NAME,
    callers,
    from_user,
    with_calls_as_text,
    with_description,
)

ANSWER = "number one"
"""Answer that stands for all answers of the policy. Templates strip white space and thoughts, and
this text has neither."""
END = 64
"""Number of characters in the end of a text; the longest mark of a thought is shorter."""
_QUESTION = Message(role="user", content="Which number?")
_WORD = re.compile("[A-Za-z0-9]+")
_RESULT = Message(role="tool", content="kzqw", name=PROBE_NAME, call_id=PROBE_ID)


@dataclass(frozen=True)
class Turns:
    """Renderer of the messages of an environment, with the chat template of the model, or without
    one (`chat_template: false`), as plain text."""

    tokenizer: PromptTokenizer
    template: TemplateConfig
    end_tokens: frozenset[int]
    """Tokens with which the policy may end a turn, as the engines know them."""

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[array[int], str]:
        """Return the tokens before the first turn of the policy, and their text.

        Args:
            messages: what the environment said. Results of tools are messages of the user if the
                template does not know them.
            tools: descriptions of the tools that the policy may call, as chat templates take them.
                If the template does not show tools, they are described in the system message, or
                in the user's if the template refuses that.

        Raises:
            DataError: the template refuses the messages.
        """
        with_results = any(message.role == "tool" for message in messages)
        if with_results and self.template.chat_template and not self.knows_results:
            messages = from_user(messages)
        if tools and not self.shows_tools:
            role = "system" if self.template.chat_template and self._knows_system else "user"
            messages, tools = with_description(messages, tools, role), ()
        if not self.template.chat_template:
            text = _plain(messages)
            encoded = self.tokenizer([text], add_special_tokens=True)
        else:
            text = self._rendered(messages, tools)
            encoded = self.tokenizer([text], add_special_tokens=False)
        return array(TOKEN_TYPE, encoded["input_ids"][0]), text

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> array[int]:
        """Return all tokens before the next turn of the policy, with its earlier turns as the
        template renders them.

        Args:
            messages: the whole conversation, with the turns of the policy as messages of the
                assistant.
            tools: descriptions of the tools that the policy may call.

        Raises:
            DataError: the template refuses the messages, or leaves out the result of a tool.
        """
        if not self.knows_results:
            messages = tuple(map(with_calls_as_text, messages))
        tokens, text = self.opening(messages, tools)
        latest = messages[-1]
        word = _WORD.search(latest.content) if latest.role == "tool" else None
        if word is not None and word[0] not in text:
            raise DataError("the chat template leaves out results of tools behind a text")
        return tokens

    def text(self, tokens: array[int]) -> str:
        """Return the text of tokens, with special tokens and as it is."""
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def reply(self, messages: Sequence[Message], *, last: int | None) -> array[int]:
        """Return the tokens between a turn of the policy and its next one.

        They are the end mark of the turn, unless the policy ended it, then the messages, and the
        beginning of the next turn.

        Args:
            messages: what the environment said.
            last: last token of the policy's turn; None if the turn was cut, so that no token of it
                is an end.

        Raises:
            DataError: the template refuses the messages, or does not render them behind an answer.
        """
        if not self.template.chat_template:
            return array(TOKEN_TYPE, inner_tokens(_plain(messages), self.tokenizer))
        with_results = any(message.role == "tool" for message in messages)
        if with_results and self.knows_results:
            tokens = self._behind_call(messages)
        else:
            tokens = self._behind_answer(from_user(messages))
        first = tokens[0] if tokens else None
        if last is not None and (
            last == first or (last in self.end_tokens and first in self._end_marks)
        ):
            del tokens[0]
        return array(TOKEN_TYPE, tokens)

    def said(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn with its special tokens, but without the token that ends it."""
        ends = bool(tokens) and tokens[-1] in self.end_tokens
        kept = list(tokens[:-1] if ends else tokens)
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def prompt_end(self, tokens: array[int]) -> str:
        """Return the end of the text before a turn of the policy; some templates open a thought
        there.

        Args:
            tokens: tokens before the turn, or the last of them.
        """
        return self.text(tokens[-END:])[-END:] if self.template.chat_template else ""

    @cached_property
    def shows_tools(self) -> bool:
        """True if the chat template shows the tools that it is given."""
        if not self.template.chat_template:
            return False
        return PROBE_NAME in self._rendered([_QUESTION], [DESCRIPTION])

    @cached_property
    def knows_results(self) -> bool:
        """True if the chat template renders messages with the role `tool`. If it does not, they
        are messages of the user."""
        if not self.template.chat_template:
            return False
        try:
            self._behind_call([_RESULT])
        except DataError:
            return False
        return True

    @cached_property
    def _final_mark(self) -> list[int]:
        """Tokens of the mark behind the last answer of a conversation; none if there is no mark."""
        return inner_tokens(end_mark(self.tokenizer, self.template), self.tokenizer)

    @cached_property
    def _knows_system(self) -> bool:
        """True if the chat template takes a system message."""
        try:
            self._rendered([Message("system", ANSWER), _QUESTION])
        except DataError:
            return False
        return True

    @cached_property
    def _end_marks(self) -> frozenset[int]:
        """First token of the text behind an answer if that token is a mark of the end.

        Some templates mark the end of an answer in the middle of a conversation otherwise than at
        its end (gpt-oss), and some do not mark it, so that the first token begins the next message
        (GLM-4.5). A mark of the end is the one at the end of a conversation, or ends the message of
        the user as well.
        """
        tokens = self._behind_answer([_QUESTION])
        is_mark = tokens[:1] == self._final_mark[:1] or tokens[0] in tokens[1:]
        return frozenset(tokens[:1] if is_mark else ())

    def _behind_answer(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template puts behind an answer: its end mark, the messages,
        and the beginning of the next answer. DataError if the template refuses them or leaves out
        the answer."""
        text = self._rendered((_QUESTION, Message(role="assistant", content=ANSWER), *messages))
        before, found, after = text.partition(ANSWER)
        if not found or not before:
            raise DataError(
                "the chat template leaves out the assistant's message before those of the "
                "environment; use another one (tokenizer.chat_template)"
            )
        return inner_tokens(after, self.tokenizer)

    def _behind_call(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template puts behind a call of tools: the end of the turn, the
        messages, and the beginning of the next turn.

        Args:
            messages: what the environment said; at least one has the role `tool`.

        Raises:
            DataError: the template refuses results of tools, or leaves them out.
        """
        result = next(each.content for each in messages if each.role == "tool")
        word = _WORD.search(result)  # templates may strip and escape the rest
        for caller, times in callers(messages, ANSWER):
            try:
                text = self._rendered((_QUESTION, caller, *messages), [DESCRIPTION])
            except (DataError, TypeError):  # TypeError: a template adds an object to a text
                continue
            parts = text.split(ANSWER, times)
            if len(parts) <= times or (word and word[0] not in parts[-1]):
                continue
            tokens = inner_tokens(parts[-1], self.tokenizer)
            if not caller.calls:
                return tokens
            final = self._final_mark
            for place, token in enumerate(tokens):
                marked = final and tokens[place : place + len(final)] == final
                if token in self.end_tokens or marked:
                    return tokens[place:]
        raise DataError("the chat template does not render results of tools")

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text of messages up to where the assistant must begin to write; DataError if
        the template refuses them."""
        return apply_template(
            messages,
            self.tokenizer,
            self.template,
            "what the environment said",
            asks=True,
            tools=tools,
        )


def _plain(messages: Sequence[Message]) -> str:
    """Return the contents of the messages, joined without a separator."""
    return "".join(message.content for message in messages)
