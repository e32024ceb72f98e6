"""Rows of a data file as tokens, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mcore_adapter.errors import DataError

Row = Mapping[str, Any]
Message = Mapping[str, Any]
Tokenizer = Any
"""Of transformers, which is untyped."""


@dataclass(frozen=True)
class Encoded:
    """One sequence."""

    tokens: list[int]
    trained: list[bool]
    """Whether the model learns to predict the token; never the first, which follows nothing."""

    def part(self, start: int, end: int) -> Encoded:
        return Encoded(
            self.tokens[start:end], [i > 0 and t for i, t in enumerate(self.trained[start:end])]
        )


Encode = Callable[[Row, Tokenizer], tuple[Encoded, ...]]
"""The sequences of a row: one, or the chosen and the rejected one.

Raises:
    DataError: says what is wrong with the row.
"""


def encode_text(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """{"text"}: all is trained on, and where the model knows an end of text, that it ends."""
    text = _text(_field(row, "text"), "text")
    if not text:
        raise DataError("text is empty")
    tokens = [*tokenizer(text)["input_ids"], *_end(tokenizer)]
    return (_checked(tokens, [True] * len(tokens), "text"),)


def encode_answer(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """{"messages"} or {"prompt", "completion"}: what the assistant says is trained on."""
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            raise DataError("it has messages and prompt or completion; expected one of the two")
        return (_chat([], _messages(row["messages"], "messages"), tokenizer, "messages"),)
    return (_continued(_field(row, "prompt"), _field(row, "completion"), tokenizer, "completion"),)


def encode_pair(row: Row, tokenizer: Tokenizer) -> tuple[Encoded, ...]:
    """{"chosen", "rejected"}, with or without {"prompt"}: chosen first. Of two conversations
    without prompt, the messages that they start with alike are the prompt."""
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
    """A prompt and its answer: both text, both messages, or messages answered by text."""
    if isinstance(prompt, list):
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        return _chat(_messages(prompt, "prompt"), _messages(answer, name), tokenizer, name)
    if not _text(answer, name):
        raise DataError(f"{name} is empty")
    before = tokenizer(_text(prompt, "prompt"))["input_ids"]
    # Apart from the prompt, as the model will meet it.
    after = [*tokenizer(answer, add_special_tokens=False)["input_ids"], *_end(tokenizer)]
    trained = [False] * len(before) + [True] * len(after)
    return _checked([*before, *after], trained, name)


def _chat(
    before: Sequence[Message], messages: Sequence[Message], tokenizer: Tokenizer, name: str
) -> Encoded:
    """A conversation through the model's template; trained on is what it renders for turns of the
    assistant among `messages`, the end of each turn included.

    A turn's tokens are those that come after what the model will be given to answer. That holds
    only where each rendering starts with the one before, which is checked.
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
        given = _render(whole[:turn], tokenizer, ask=True)
        until = _render(whole[: turn + 1], tokenizer)
        if until[: len(given)] != given or tokens[: len(until)] != until:
            later = "with the messages after it" if until[: len(given)] == given else "as an answer"
            raise DataError(
                f"{name}: the chat template renders message {turn + 1} otherwise {later} than "
                "alone, so that its tokens cannot be told; end the conversation there, or use a "
                "template that only appends"
            )
        trained[len(given) : len(until)] = [True] * (len(until) - len(given))
    return _checked(tokens, trained, name)


def _render(messages: Sequence[Message], tokenizer: Tokenizer, *, ask: bool = False) -> list[int]:
    if not messages:
        return []
    try:
        # Templates are programs, and raise what they like.
        found: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=ask, return_dict=False
        )
    except Exception as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    return found


def _checked(tokens: list[int], trained: list[bool], name: str) -> Encoded:
    found = Encoded(tokens, trained).part(0, len(tokens))
    if not any(found.trained):
        raise DataError(f"{name} gives {len(tokens)} tokens and none to train on")
    return found


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _field(row: Row, name: str) -> Any:
    if name not in row:
        raise DataError(f"it has no {name!r}, only {', '.join(map(repr, row)) or 'nothing'}")
    return row[name]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is of type {type(value).__name__}, expected text")
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        raise DataError(
            f'{name} is no list of messages such as {{"role": "user", "content": ".."}}'
        )
    return value
