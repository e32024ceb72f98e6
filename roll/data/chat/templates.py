"""Conversion of prompt rows to text, by chat template or unchanged, and of text to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from roll.config.sections.data import RenderConfig
from roll.config.user_code.calls import OwnCode
from roll.core.errors import DataError, RollError, RowError
from roll.core.types import Message
from roll.data.columns import PromptRow
from roll.data.own.template import ChatTemplate


class PromptTokenizer(Protocol):
    """Part of the interface of a Hugging Face tokenizer that this package uses."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def is_fast(self) -> bool:
        """True if the tokenizer can return the characters that each token stands for."""
        ...

    @property
    def unk_token_id(self) -> Any: ...

    @property
    def unk_token(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...

    def __call__(self, text: list[str], **kwargs: Any) -> Any: ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by their ids; only fast tokenizers are asked for them."""
        ...

    @property
    def split_special_tokens(self) -> bool:
        """True if the tokenizer takes special tokens for text; only fast ones are asked."""
        ...


@dataclass(frozen=True)
class DatedTokenizer:
    """Tokenizer whose chat template gets a fixed time as the current time.

    Templates that contain the date call `strftime_now`. A run renders its rows again at each start,
    and the rows of a resumed run must not change with the date.
    """

    tokenizer: Any
    moment: datetime
    """Current time as seen by the template."""

    @property
    def chat_template(self) -> Any:
        return self.tokenizer.chat_template

    @property
    def eos_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def is_fast(self) -> bool:
        """True if the tokenizer can return the characters that each token stands for; False for one
        that does not say."""
        # mistral-common's tokenizers have neither this nor added tokens.
        return bool(getattr(self.tokenizer, "is_fast", False))

    @property
    def unk_token_id(self) -> Any:
        return self.tokenizer.unk_token_id

    @property
    def unk_token(self) -> Any:
        return self.tokenizer.unk_token

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:
        """Render messages as the tokenizer does; the template gets the fixed time if it asks for
        the time."""
        if "strftime_now" in str(self.chat_template):
            # Only if the template uses it, because some tokenizers reject unknown arguments.
            kwargs = {"strftime_now": self.moment.strftime} | kwargs
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    def __call__(self, text: list[str], **kwargs: Any) -> Any:
        return self.tokenizer(text, **kwargs)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added tokens with their ids; empty for a tokenizer that has no such method."""
        return dict(getattr(self.tokenizer, "get_added_vocab", dict)())

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by their ids, of a fast tokenizer."""
        found: Mapping[int, Any] = self.tokenizer.added_tokens_decoder
        return found

    @property
    def split_special_tokens(self) -> bool:
        """True if the tokenizer, a fast one, takes special tokens for text."""
        return bool(self.tokenizer.split_special_tokens)

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any:
        return self.tokenizer.decode(token_ids, **kwargs)


def render_prompt(
    row: PromptRow, tokenizer: PromptTokenizer, data: RenderConfig, system: str | None
) -> str:
    """Return the text of a prompt, ready to be tokenized.

    Args:
        system: system message of the source, put before the conversation; None if there is none.

    Raises:
        RowError: the template fails on the row, the text has half of a surrogate pair, or both the
            row and its source have a system message; or `chat_template` is False, but the row has
            messages.
        DataError: the tokenizer has no chat template; or `chat_template` is False, but the source
            has a system message.
    """
    if not data.chat_template:
        if system is not None:
            raise DataError(
                "`system` needs a chat template; remove it or set `data.chat_template: true`"
            )
        return sound_text(_plain(row), row.place)
    if data.chat_template is True and not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set `data.chat_template: false` to take the "
            "prompt text as it is, or use an instruction-tuned model"
        )
    messages = with_system(row.asked, system, row.place)
    text = apply_template(messages, tokenizer, data, row.place, asks=True)
    return sound_text(text, row.place)


def sound_text(text: str, place: str) -> str:
    """Return a text that is to be tokenized; RowError if it has half of a surrogate pair, which
    JSON can hold but no tokenizer takes. `place` is file and row, for the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise RowError(
            f"{place}: the text has half of a surrogate pair ({text[at]!a} behind "
            f"{text[max(at - 20, 0) : at]!r}), which is no character; correct or remove it"
        ) from None
    return text


def tokenize_prompts(
    texts: Sequence[str], tokenizer: PromptTokenizer, data: RenderConfig
) -> list[tuple[int, ...]]:
    """Return the tokens of each text.

    A rendered template already contains its special tokens. Plain text gets the special tokens that
    the tokenizer adds to any input (a beginning-of-sequence token, if the model expects one).
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=not data.chat_template)
    return [tuple(ids) for ids in encoded["input_ids"]]


def with_system(
    messages: tuple[Message, ...], system: str | None, place: str
) -> tuple[Message, ...]:
    """Return the messages of a row, after the system message of its source if there is one.

    Args:
        messages: at least one message.
        system: system message of the source; None if there is none.
        place: file and row, for the error message.

    Raises:
        DataError: both the row and its source have a system message.
    """
    if system is None:
        return messages
    if messages[0].role == "system":
        raise RowError(
            f"{place}: begins with a system message, and its source sets `system`; keep one of the "
            "two"
        )
    return (Message(role="system", content=system), *messages)


def apply_template(
    messages: Sequence[Message],
    tokenizer: PromptTokenizer,
    template: RenderConfig,
    place: str,
    *,
    asks: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render a conversation to text with the chat template.

    Args:
        place: file and row of the conversation, for the error message.
        asks: if True, the text ends where the assistant must begin to write.
        tools: descriptions of the tools that the assistant may call.

    Raises:
        DataError: the template fails on the conversation.
    """
    from jinja2 import TemplateError

    own: object = template.chat_template
    if isinstance(own, ChatTemplate):
        return _rendered_by_user(own, [_as_dict(turn) for turn in messages], place, asks, tools)
    try:
        text = tokenizer.apply_chat_template(
            [_as_dict(turn) for turn in messages],
            tokenize=False,
            add_generation_prompt=asks,
            **({"tools": list(tools)} if tools else {}),
            **template.chat_template_kwargs,
        )
    except TemplateError as error:
        raise RowError(f"{place}: the chat template refuses this row: {error}") from None
    assert isinstance(text, str)
    return text


def _rendered_by_user(
    own: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    place: str,
    asks: bool,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """Render a conversation with a template of the user's; the arguments and errors are those of
    `apply_template`."""
    code = OwnCode(own, "data.chat_template")
    try:
        text = code.call(own.render, f" for {place}", messages, asks=asks, tools=tools)
        code.require(isinstance(text, str), f"{text!r:.60} for {place}", "a text")
    except RollError as error:
        raise DataError(str(error)) from error  # told once: the code is wrong, not the rows
    return text


def _as_dict(message: Message) -> dict[str, Any]:
    """Return a message with the keys that chat templates know."""
    found: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.name:
        found["name"] = message.name
    if message.call_id:
        found["tool_call_id"] = message.call_id
    if message.calls:
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({"id": call.id} if call.id else {}),
            }
            for call in message.calls
        ]
    return found


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return the text of a message; if it has pictures, its parts as chat templates know them."""
    if not message.parts:
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in message.parts
    ]


def _plain(row: PromptRow) -> str:
    """Return the prompt of a row as it is; DataError if the row holds messages instead."""
    if row.pictures:
        raise RowError(
            f"{row.place}: pictures need a chat template, which says how the model marks them; set "
            "`data.chat_template: true`"
        )
    if row.prompt is None:
        raise RowError(
            f"{row.place}: messages need a chat template; set `data.chat_template: true` or use a "
            "`prompt` column"
        )
    return row.prompt
