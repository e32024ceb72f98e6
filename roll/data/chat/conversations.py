"""Conversion of rows of texts and preferences to `Conversation`s; errors name file and row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.sections.data import FileConfig, PreferenceSource, TaughtSource, TextSource
from roll.core.errors import RowError
from roll.core.types import Message
from roll.data.columns import (
    RawRow,
    folder_of,
    messages_of,
    pictures_of_column,
    require_columns,
    show,
    text_of,
)
from roll.data.pictures.parts import with_pictures
from roll.data.pictures.picture import Picture, pictures_in
from roll.data.preparation.templates import turns_of, with_texts


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that are context only, and messages that contain what is trained.

    Example: Conversation((Message("user", "1+1="),), (Message("assistant", "2"),))
    """

    before: tuple[Message, ...]
    """Messages that are never trained."""
    after: tuple[Message, ...]
    """Messages whose assistant turns are trained."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, in order."""
        return (*self.before, *self.after)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Pictures of the messages up to the last turn of the assistant, in order. What is behind
        it is not read."""
        turns = range(len(self.after), 0, -1)
        end = next((n for n in turns if self.after[n - 1].role == "assistant"), len(self.after))
        return pictures_in((*self.before, *self.after[:end]))

    def with_pictures(self, pictures: Sequence[Picture] | None, place: str) -> Conversation:
        """Return the conversation with the pictures of the row's column in their places; DataError
        as in `roll.data.pictures.parts.with_pictures`."""
        whole = with_pictures((*self.before, *self.after), pictures, place)
        return Conversation(whole[: len(self.before)], whole[len(self.before) :])


@dataclass(frozen=True, slots=True)
class DialogueRow:
    """Row of a source of texts or preferences."""

    place: str
    """File and row, for error messages."""
    conversations: tuple[Conversation, ...]
    """One conversation; or two for a pair, the chosen one and then the rejected one."""
    margin: float | None = None
    """Lead of the chosen response over the rejected one; None if the source has no margins."""
    label: bool | None = None
    """True if a single response is wanted, False if it is not; None for pairs and texts."""
    tag: str = "default"
    """Tag that selects the teacher of the row."""


def map_text(row: RawRow, source: TextSource) -> DialogueRow:
    """Convert a row by the columns of a source of texts to imitate.

    Raises:
        DataError: a column is missing or holds the wrong type.
    """
    columns = source.columns
    row = _with_texts(row, source)
    values = row.values
    if isinstance(columns.messages, tuple):
        conversation = Conversation((), turns_of(columns.messages, values, row.place))
    elif columns.completion is None:
        assert columns.messages is not None
        where = f"{row.place}: column {columns.messages!r}"
        messages = messages_of(values[columns.messages], where, folder_of(source))
        conversation = Conversation((), messages)
    else:
        before = _messages_of_column(row, columns.prompt, source, role="user")
        response = _messages_of_column(row, columns.completion, source, role="assistant")
        conversation = _joined(before, response, f"{row.place}: column {columns.completion!r}")
    pictures = pictures_of_column(row, columns.images, source)
    conversation = conversation.with_pictures(pictures, row.place)
    return DialogueRow(row.place, (conversation,), tag=_tag(values, source, row.place))


def _with_texts(row: RawRow, source: FileConfig) -> RawRow:
    """Return a row with the texts that its source makes of columns; DataError if one is missing or
    holds neither text nor a number."""
    require_columns(row.values, source, row.place)
    return RawRow(row.place, with_texts(row.values, source, row.place))


def _tag(values: Mapping[str, Any], source: TextSource, place: str) -> str:
    """Return the row's tag from its column or its source, or `default` for sources without tags;
    DataError if it is no text."""
    if not isinstance(source, TaughtSource):
        return "default"
    column = source.columns.tag
    if column is None:
        return source.tag
    tag = values[column]
    if not isinstance(tag, str) or not tag:
        raise RowError(f"{place}: column {column!r} holds {show(tag)}; expected the name of a tag")
    return tag


def map_preference(row: RawRow, source: PreferenceSource) -> DialogueRow:
    """Convert a row by the columns of a source of preferences.

    Raises:
        DataError: a column is missing or holds the wrong type.
    """
    columns = source.columns
    row = _with_texts(row, source)
    values = row.values
    pictures = pictures_of_column(row, columns.images, source)
    before = _messages_of_column(row, columns.prompt, source, role="user")
    if columns.label is not None:
        response = _messages_of_column(row, columns.completion, source, role="assistant")
        label = values[columns.label]
        if label not in (True, False):  # 0 and 1 are equal to these
            raise RowError(
                f"{row.place}: column {columns.label!r} must be true or false, found {show(label)}"
            )
        joined = _joined(before, response, f"{row.place}: column {columns.completion!r}")
        single = joined.with_pictures(pictures, row.place)
        return DialogueRow(row.place, (single,), label=bool(label))
    chosen = _messages_of_column(row, columns.chosen, source, role="assistant")
    rejected = _messages_of_column(row, columns.rejected, source, role="assistant")
    if columns.prompt is None:
        shared = _shared_turns(chosen, rejected)
        before, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        pair = (Conversation(before, chosen), Conversation(before, rejected))
    else:
        pair = (
            _joined(before, chosen, f"{row.place}: column {columns.chosen!r}"),
            _joined(before, rejected, f"{row.place}: column {columns.rejected!r}"),
        )
    margin = None if columns.margin is None else _margin(values, columns.margin, row.place)
    filled = tuple(each.with_pictures(pictures, row.place) for each in pair)
    return DialogueRow(row.place, filled, margin=margin)


def _messages_of_column(
    row: RawRow, name: str | None, source: FileConfig, *, role: str
) -> tuple[Message, ...]:
    """Return column `name` of a row as messages: a text becomes one message of `role`.

    Without a column (`name` is None) the result is empty. A response may be empty; its row is left
    out and counted later.

    Raises:
        DataError: the value is neither text nor a list of messages, or a prompt is blank.
    """
    if name is None:
        return ()
    value, place = row.values[name], row.place
    if value is None and role == "assistant":
        value = ""
    if isinstance(value, str) and not _is_conversation(value):
        text = value if role == "assistant" else text_of(row.values, name, place)
        return (Message(role=role, content=text),)
    if not isinstance(value, str | Sequence):
        raise RowError(
            f"{place}: column {name!r} must be text or a list of messages, found {show(value)}"
        )
    return messages_of(value, f"{place}: column {name!r}", folder_of(source))


def _joined(before: tuple[Message, ...], response: tuple[Message, ...], where: str) -> Conversation:
    """Return a prompt and its response as a conversation. A response that begins with the prompt,
    or with the last messages of it, loses them: many data sets give both.

    Args:
        where: file, row and column of the response, with which the error message begins.

    Raises:
        RowError: the response begins with another system message than the prompt, or with another
            message of the user than the one with which the prompt ends.
    """
    (own_system, asked), (system, said) = _apart(before), _apart(response)
    if own_system and system and not _alike(own_system, system):
        raise RowError(f"{where} begins with another system message than the prompt; {_ADVICE}")
    count = _repeated(asked, said)
    if not count:
        users = [messages[at].role for messages, at in ((asked, -1), (said, 0)) if messages]
        if users == ["user", "user"] and any(turn.role == "assistant" for turn in said):
            raise RowError(
                f"{where} begins with a message of the user, but so does the prompt end, with "
                f"another one; {_ADVICE}"
            )
        return Conversation(before, said if own_system else response)
    # Pictures may be in one of the two only.
    pairs = zip(asked[-count:], said, strict=False)
    repeated = (first if first.parts else second for first, second in pairs)
    return Conversation((*(own_system or system), *asked[:-count], *repeated), said[count:])


_ADVICE = (
    "if responses are whole conversations, set `columns.prompt: null`; if not, let them begin with "
    "the turn of the assistant"
)


def _apart(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the system messages at the start, and the messages behind them."""
    start = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
    return messages[:start], messages[start:]


def _repeated(asked: tuple[Message, ...], said: tuple[Message, ...]) -> int:
    """Count the last messages of a prompt with which its response begins. A response that begins
    with the assistant goes on with the prompt: none."""
    if not said or said[0].role == "assistant":
        return 0
    longest = min(len(asked), len(said))
    return next((n for n in range(longest, 0, -1) if _alike(asked[-n:], said[:n])), 0)


def _alike(some: tuple[Message, ...], others: tuple[Message, ...]) -> bool:
    """Return whether the same speakers say the same, but for pictures and white space around it."""
    told = [[(each.role, each.content.strip()) for each in turns] for turns in (some, others)]
    return told[0] == told[1]


def _is_conversation(text: str) -> bool:
    """Return True if the text is a JSON list of messages; other texts may begin with `[` too."""
    if not text.lstrip().startswith("["):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(
        isinstance(item, dict) and {"role", "content"} <= item.keys() for item in found
    )


def _shared_turns(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Count the equal messages at the start of both; at least one message of each is not
    counted."""
    longest = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(longest) if chosen[i] != rejected[i]), longest)


def _margin(values: Mapping[str, Any], name: str, place: str) -> float:
    """Return the margin of a row; DataError unless it is a finite number."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"{place}: column {name!r} must be a number, found {show(value)}")
    return float(value)
