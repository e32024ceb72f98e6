"""Encoding of the rows of a data file as tokens, with a mark on each token that is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mcore_adapter.errors import DataError

Row = Mapping[str, Any]
Message = Mapping[str, Any]
Tokenizer = Any
"""Tokenizer of transformers, which has no type annotations."""


@dataclass(frozen=True)
class Encoded:
    """Encoded sequence."""

    tokens: list[int]
    trained: list[bool]
    """True for each token that the model learns to predict. The first token is never trained,
    because no token precedes it."""

    def part(self, start: int, end: int) -> Encoded:
        """Return the tokens from `start` to `end` as a sequence whose first token is not trained.

        `end` is exclusive.
        """
        return Encoded(
            self.tokens[start:end], [i > 0 and t for i, t in enumerate(self.trained[start:end])]
        )


Encode = Callable[[Row, Tokenizer], tuple[Encoded, ...]]
"""Function that encodes a row as one sequence, or as a chosen and a rejected sequence.

Raises:
    DataError: the row cannot be used; the message says why.
"""


def encode_text(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """Encode a row {"text"} for pretraining.

    All tokens are trained except the first. The end-of-text token is appended if the tokenizer has
    one. DataError if the text is missing, empty, or leaves nothing to train.
    """
    text = _text(_field(row, "text"), "text")
    if not text:
        raise DataError("text is empty")
    tokens = [*tokenizer(text)["input_ids"], *_end(tokenizer)]
    return (_checked(tokens, [True] * len(tokens), "text"),)


def encode_answer(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """Encode a row {"messages"} or {"prompt", "completion"} for supervised fine-tuning.

    The turns of the assistant, or the completion, are trained. DataError if columns are missing, of
    another type or of both forms, or if nothing is left to train.
    """
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            raise DataError("it has messages and prompt or completion; expected one of the two")
        return (_chat([], _messages(row["messages"], "messages"), tokenizer, "messages"),)
    return (_continued(_field(row, "prompt"), _field(row, "completion"), tokenizer, "completion"),)


def encode_pair(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """Encode a row {"chosen", "rejected"} with an optional {"prompt"} for DPO, chosen first.

    Without a prompt, chosen and rejected may be conversations. The equal messages at their start
    then are the prompt. DataError if a column is missing or of another type, or if both answers are
    the same.
    """
    chosen, rejected = _field(row, "chosen"), _field(row, "rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and "prompt" not in row:
        pairs = zip(chosen, rejected, strict=False)
        prompt: Any = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not chosen and not rejected:
            raise DataError("chosen and rejected are the same; expected two different answers")
    else:
        prompt = row.get("prompt", "")
    found = tuple(
        _continued(prompt, answer, tokenizer, name)
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    )
    if found[0].tokens == found[1].tokens:
        raise DataError("chosen and rejected are the same; expected two different answers")
    return found


def _continued(prompt: Any, answer: Any, tokenizer: Tokenizer, name: str) -> Encoded:
    """Encode a prompt and its answer, of which the answer is trained.

    Args:
        prompt: text, or a list of messages.
        answer: text, or a list of messages if the prompt is one.
        name: name of the answer, for error messages.

    Raises:
        DataError: the answer is empty, or prompt and answer do not have these types.
    """
    if isinstance(prompt, list):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        return _chat(_messages(prompt, "prompt"), _messages(answer, name), tokenizer, name)
    if not _text(answer, name):
        raise DataError(f"{name} is empty")
    before = tokenizer(_text(prompt, "prompt"))["input_ids"]
    # Encoded separately from the prompt, because in generation the prompt's tokens are fixed, too.
    after = [*tokenizer(answer, add_special_tokens=False)["input_ids"], *_end(tokenizer)]
    trained = [False] * len(before) + [True] * len(after)
    return _checked([*before, *after], trained, name)


def _chat(
    before: Sequence[Message], messages: Sequence[Message], tokenizer: Tokenizer, name: str
) -> Encoded:
    """Encode a conversation with the chat template of the model.

    The turns of the assistant in `messages` are trained, with the end of each turn.

    Args:
        before: messages at the start, which are not trained.
        messages: messages that follow.
        name: name of the messages in the row, for error messages.

    Raises:
        DataError: the conversation cannot be encoded.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{name} are messages, and the model has no chat template; add chat_template.jinja to "
            "its folder, or write rows of text"
        )
    whole = [*before, *messages]
    turns = [i for i in range(len(before), len(whole)) if whole[i]["role"] == "assistant"]
    if not turns:
        raise DataError(f"{name} has no turn of the assistant; there is nothing to train on")
    tokens = _render(whole, tokenizer)
    trained = [False] * len(tokens)
    for turn in turns:
        if not whole[turn].get("content") and not whole[turn].get("tool_calls"):
            raise DataError(f"{name}: message {turn + 1} is an empty answer of the assistant")
        start, end = _bounds_of_turn(turn, whole, tokens, tokenizer, name)
        trained[start:end] = [True] * (end - start)
    return _checked(tokens, trained, name)


def _bounds_of_turn(
    turn: int, messages: Sequence[Message], tokens: list[int], tokenizer: Tokenizer, name: str
) -> tuple[int, int]:
    """Return the bounds of an assistant's turn, without its header, in `tokens` (all messages).

    They are found by rendering: first the messages before the turn with the generation prompt, then
    the messages up to and including it. A first message starts at 0, header included.

    Raises:
        DataError: the template fails, or a longer rendering does not begin with a shorter one.
    """
    given = _render(messages[:turn], tokenizer, ask=True)
    until = _render(messages[: turn + 1], tokenizer)
    if until[: len(given)] != given or tokens[: len(until)] != until:
        later = "with the messages after it" if until[: len(given)] == given else "as an answer"
        raise DataError(
            f"{name}: the chat template renders message {turn + 1} otherwise {later} than "
            "alone, so that its tokens cannot be told; end the conversation there, or use a "
            "template that only appends"
        )
    return len(given), len(until)


def _render(messages: Sequence[Message], tokenizer: Tokenizer, *, ask: bool = False) -> list[int]:
    """Return the tokens of messages in the chat template of the model, which must have one.

    Args:
        messages: messages; without any, the result is empty.
        ask: end with the generation prompt, after which the assistant answers.

    Raises:
        DataError: the template fails on the messages.
    """
    if not messages:
        return []
    try:
        # A template is a program and can raise any exception.
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=ask, return_dict=False
        )
    except Exception as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error


def _checked(tokens: list[int], trained: list[bool], name: str) -> Encoded:
    """Return the sequence, with its first token not trained.

    Args:
        tokens: tokens of the sequence.
        trained: True for each token to train.
        name: name of the column, for the error message.

    Raises:
        DataError: no token is left to train.
    """
    found = Encoded(tokens, trained).part(0, len(tokens))
    if not any(found.trained):
        raise DataError(f"{name} gives {len(tokens)} tokens and none to train on")
    return found


def _end(tokenizer: Tokenizer) -> list[int]:
    """Return the end-of-text token as a list; the list is empty if the tokenizer has none."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _field(row: Row, name: str) -> Any:
    """Return the value of a column of the row.

    Raises:
        DataError: the row has no such column.
    """
    if name not in row:
        raise DataError(f"it has no {name!r}, only {', '.join(map(repr, row)) or 'nothing'}")
    return row[name]


def _text(value: Any, name: str) -> str:
    """Return the value of the column `name`, which must be text.

    Raises:
        DataError: the value is of another type.
    """
    if not isinstance(value, str):
        raise DataError(f"{name} is of type {type(value).__name__}, expected text")
    return value


def _messages(value: Any, name: str) -> list[Message]:
    """Return the value of a column as chat messages.

    Args:
        value: value from the row.
        name: name of the column, for the error message.

    Raises:
        DataError: the value is no list of objects that each have a role.
    """
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        raise DataError(
            f'{name} is no list of messages such as {{"role": "user", "content": ".."}}'
        )
    return value
