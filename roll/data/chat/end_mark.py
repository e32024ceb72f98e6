"""End mark: the text that a chat template puts after an answer."""

from __future__ import annotations

import itertools

from roll.config.sections.data import TemplateConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.chat.templates import PromptTokenizer, apply_template


def end_mark(tokenizer: PromptTokenizer, template: TemplateConfig) -> str:
    """Return the text that the chat template puts after an answer.

    The result is empty or white space if the template does not mark the end. The mark is found by
    rendering two answers that differ only at their end: the mark is the text that follows in both.
    The text of a row would not do, because templates may rewrite it.

    Raises:
        DataError: the template fails on a conversation of one question and one answer, with and
            without a system message; or it does not render answers.
    """
    first, second = _answers_rendered(tokenizer, template)
    if first == second:
        raise DataError(
            "the chat template does not render what the assistant says; use another one "
            "(tokenizer.chat_template)"
        )
    return first[len(first) - common_start(first[::-1], second[::-1]) :]


def common_start(a: str, b: str) -> int:
    """Return the length of the longest common start of both texts, in characters."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in same)


def _answers_rendered(tokenizer: PromptTokenizer, template: TemplateConfig) -> tuple[str, str]:
    """Render one conversation with two different answers.

    The conversation has a system message if the template fails without one.

    Raises:
        DataError: the template fails in both cases.
    """
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
