"""`Context`: what the policy sees where the chat template may rewrite its earlier turns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import ConfigError, DataError
from roll.core.types import Message
from roll.data.chat.turns import Turns
from roll.rewards.thinking import CHANNEL, MARKS

_QUESTION = Message("user", "Which way?")
_PROBE = "kzqw"
"""Thought that no template has."""


@dataclass
class Context:
    """Tokens of a row so far: those that the policy was given, and those that it wrote.

    A row goes on as long as the chat template renders the conversation as the text of these tokens.
    Texts are compared and not tokens, because a policy may write a text in other tokens than the
    tokenizer would; its own are kept.
    """

    turns: Turns
    tokens: array[int]

    def wrote(self, tokens: array[int]) -> None:
        """Add a turn of the policy."""
        self.tokens = self.tokens + tokens

    def next(
        self,
        new: Sequence[Message],
        whole: Sequence[Message],
        *,
        last: int | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[array[int], bool]:
        """Return the tokens before the next turn, and whether they begin a new row; if not, they
        continue this one.

        Args:
            new: messages since the latest turn.
            whole: all messages of the conversation, with the turns of the policy.
            last: last token of the latest turn; None if the turn was cut.
            tools: tools that the conversation began with.

        Raises:
            DataError: the chat template refuses the messages.
        """
        reply = self.turns.reply(new, last=last)
        rendered = self.turns.conversation(whole, tools)
        kept = self.tokens + reply
        if self.turns.text(kept) == self.turns.text(rendered):
            self.tokens = kept
            return reply, False
        self.tokens = rendered
        return rendered, True


def rewrites_turns(turns: Turns) -> bool:
    """Return whether the chat template drops the thoughts of earlier turns of the policy.

    Args:
        turns: renderer with the chat template.
    """
    if not turns.template.chat_template:
        return False
    own = turns.template.chat_template is not True  # a class of the user's, whose text is unknown
    template = "" if own else str(turns.tokenizer.chat_template or "")
    return CHANNEL in template or any(  # that of gpt-oss drops its channel of thoughts
        _drops(f"{opens}\n{_PROBE}\n{closes}\n\nleft", turns)
        for opens, closes in MARKS
        if own or closes in template
    )


def _drops(answer: str, turns: Turns) -> bool:
    """Return whether the chat template leaves out the probe in an earlier answer; False if it
    refuses the answer."""
    try:
        tokens = turns.conversation([_QUESTION, Message("assistant", answer), _QUESTION])
    except DataError:
        return False
    return _PROBE not in turns.text(tokens)


def check_history(name: str, config: EnvironmentConfig, turns: Turns) -> None:
    """Raise ConfigError if a chat template cannot render earlier turns of the policy from their
    text, as `history: fork` asks it to.

    Args:
        name: name of the environment in the config.
        config: its settings.
        turns: renderer with the chat template.
    """
    if config.history != "fork" or not turns.template.chat_template:
        return
    reason = ""
    if turns.template.chat_template is True and CHANNEL in str(turns.tokenizer.chat_template):
        reason = "it takes thoughts apart from the text (channels of gpt-oss)"
    try:
        turns.conversation([_QUESTION, Message("assistant", "left"), _QUESTION])
    except DataError as error:
        reason = str(error)
    if reason:
        raise ConfigError(
            f"environments.{name}.history: `fork` lets the chat template render earlier turns, and "
            f"this template cannot: {reason}; use `history: keep`"
        )
