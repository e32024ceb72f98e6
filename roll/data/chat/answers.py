"""Answers of a data set as the policy would write them, for losses that learn from them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from roll.config.sections.data import TemplateConfig
from roll.core.completion import TOKEN_TYPE
from roll.core.errors import DataError
from roll.core.types import Prompt
from roll.data.chat.end_mark import end_mark
from roll.data.chat.inner_tokens import inner_tokens
from roll.data.chat.templates import PromptTokenizer
from roll.data.chat.tokenization import check_template


@dataclass(frozen=True, slots=True)
class Answers:
    """Function from a prompt to the tokens of its answer."""

    tokenizer: PromptTokenizer
    mark: str
    """Text that ends an answer; empty if the token `eos` does."""
    eos: int | None
    """End-of-sequence token; None if the mark ends an answer."""
    limit: Callable[[str], int]
    """Function from a tag to the largest number of tokens of an answer; longer answers are cut
    there, and have no end."""

    @classmethod
    def of(
        cls, tokenizer: PromptTokenizer, template: TemplateConfig, limit: Callable[[str], int]
    ) -> Answers:
        """Return the answers as the chat template ends them, or without one, the tokenizer.

        Raises:
            DataError: the chat template fails, or neither it nor the tokenizer says how a text
                ends.
        """
        eos = check_template(tokenizer, template)
        mark = end_mark(tokenizer, template).strip() if template.chat_template else ""
        if not mark and eos is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, and the chat template puts nothing "
                "behind an answer: the policy would never learn to end"
            )
        return cls(tokenizer, mark, None if mark else eos, limit)

    def __call__(self, prompt: Prompt) -> array[int]:
        """Return the tokens, int32; DataError: the answer is empty."""
        check_answered([prompt])
        tokens = inner_tokens(prompt.answer + self.mark, self.tokenizer)
        if self.eos is not None:
            tokens.append(self.eos)
        return array(TOKEN_TYPE, tokens[: self.limit(prompt.tag)])


def check_answered(prompts: Iterable[Prompt], places: Iterable[str] = ()) -> None:
    """Raise DataError unless every prompt has an answer.

    Args:
        places: of rows without one that are on disk, which is not read for it; empty for none.
    """
    rows = (f"row {prompt.id}" for prompt in prompts if not prompt.answer.strip())
    for place in chain(rows, filter(None, places)):
        raise DataError(
            f"{place} has an empty answer, from which the policy should learn; give it one, or "
            "leave the row out"
        )
