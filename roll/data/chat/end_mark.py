"""What a chat template puts behind an answer."""

from __future__ import annotations

import itertools

from roll.config.sections.data import TemplateConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.templates import PromptTokenizer, apply_template


def end_mark(tokenizer: PromptTokenizer, template: TemplateConfig) -> str:
    """What the chat template puts behind an answer; empty or white space if it marks no end.

    Two answers that differ in their last character are rendered: what both have behind it is the
    mark. The content of a row could not tell, since templates may rewrite it.

    Raises:
        DataError: the template refuses any conversation, or does not render answers.
    """
    first, second = _answers_rendered(tokenizer, template)
    if first == second:
        raise DataError(
            "the chat template does not render what the assistant says; use another one "
            "(tokenizer.chat_template)"
        )
    return first[len(first) - common_start(first[::-1], second[::-1]) :]


def common_start(a: str, b: str) -> int:
    """Characters that both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same)


def _answers_rendered(tokenizer: PromptTokenizer, template: TemplateConfig) -> tuple[str, str]:
    """A conversation that ends with one answer, and with another."""
    question = Message(role="user", content="Which number?")
    refused: DataError | None = None
    for before in ((question,), (Message(role="system", content="Be brief."), question)):
        try:
            first, second = (
                apply_template(
                    (*before, Message(role="assistant", content=answer)),
                    tokenizer,
                    template,
                    "a conversation of one question and one answer",
                    asks=False,
                )
                for answer in ("number one", "number two")
            )
        except DataError as error:
            refused = refused or error
        else:
            return first, second
    assert refused is not None
    raise refused
