"""Rows -> text -> tokens, through the tokenizer's chat template or as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from roll.config.sections.data import DataConfig, TemplateConfig
from roll.core.errors import DataError
from roll.core.types import Message
from roll.data.columns import PromptRow


class PromptTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def is_fast(self) -> bool:
        """Whether it tells which characters a token stands for."""
        ...

    @property
    def unk_token_id(self) -> Any: ...

    @property
    def unk_token(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...

    def __call__(self, text: list[str], **kwargs: Any) -> Any: ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class DatedTokenizer:
    """A tokenizer whose chat template believes in a moment of its own.

    Templates that name the day ask `strftime_now` for it. A run renders its rows anew each time it
    is started, and they must be the same rows tomorrow.
    """

    tokenizer: Any
    moment: datetime
    """What the template takes for now."""

    @property
    def chat_template(self) -> Any:
        return self.tokenizer.chat_template

    @property
    def eos_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def is_fast(self) -> bool:
        # mistral-common's tokenizers have neither this nor added tokens.
        return bool(getattr(self.tokenizer, "is_fast", False))

    @property
    def unk_token_id(self) -> Any:
        return self.tokenizer.unk_token_id

    @property
    def unk_token(self) -> Any:
        return self.tokenizer.unk_token

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any:
        if "strftime_now" in str(self.chat_template):
            # Only where it is asked for: not every tokenizer takes what it does not know.
            kwargs = {"strftime_now": self.moment.strftime} | kwargs
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        return self.tokenizer(text, **kwargs)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(getattr(self.tokenizer, "get_added_vocab", dict)())

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any:
        return self.tokenizer.decode(token_ids, **kwargs)


def render_prompts(
    rows: Sequence[PromptRow], tokenizer: PromptTokenizer, data: DataConfig, system: str | None
) -> list[str]:
    """The text of each prompt, ready to be tokenized.

    Raises:
        DataError: the tokenizer has no chat template, a template refuses a row, or a source of
            messages (or with a system message) is to be taken as plain text.
    """
    if data.chat_template:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; set `data.chat_template: false` to take the "
                "prompt text as it is, or use an instruction-tuned model"
            )
        return [
            apply_template(conversation_of(row, system), tokenizer, data, row.place, asks=True)
            for row in rows
        ]
    if system is not None:
        raise DataError(
            "`system` needs a chat template; remove it or set `data.chat_template: true`"
        )
    return [_plain(row) for row in rows]


def tokenize_prompts(
    texts: Sequence[str], tokenizer: PromptTokenizer, data: DataConfig
) -> list[tuple[int, ...]]:
    """Tokens of each text.

    A rendered template already holds its special tokens; plain text gets those that the tokenizer
    puts around any input (a beginning-of-sequence token where the model expects one).
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=not data.chat_template)
    return [tuple(ids) for ids in encoded["input_ids"]]


def conversation_of(row: PromptRow, system: str | None) -> tuple[Message, ...]:
    """The messages of a row, the system message of its source first."""
    turns = row.messages or (Message(role="user", content=row.prompt or ""),)
    if system is not None:
        if turns[0].role == "system":
            raise DataError(
                f"{row.place}: begins with a system message, and its source sets `system`; "
                "keep one of the two"
            )
        turns = (Message(role="system", content=system), *turns)
    return turns


def apply_template(
    messages: Sequence[Message],
    tokenizer: PromptTokenizer,
    template: TemplateConfig,
    place: str,
    *,
    asks: bool,
) -> str:
    """The text of a conversation.

    Args:
        place: of its row, for the message.
        asks: the text ends where the assistant is to write.

    Raises:
        DataError: the template refuses it.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in messages],
            tokenize=False,
            add_generation_prompt=asks,
            **template.chat_template_kwargs,
        )
    except TemplateError as error:
        raise DataError(f"{place}: the chat template refuses this row: {error}") from None
    assert isinstance(text, str)
    return text


def _plain(row: PromptRow) -> str:
    if row.prompt is None:
        raise DataError(
            f"{row.place}: messages need a chat template; set `data.chat_template: true` or use a "
            "`prompt` column"
        )
    return row.prompt
