"""Conversion of rows of a file to `PromptRow`s with known fields; errors name file and row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.errors import nearest
from roll.config.sections.data import FileConfig, SourceConfig
from roll.config.sections.environment import MAX_SEED, TaskSource
from roll.core.errors import RowError
from roll.core.types import Message
from roll.data.pictures.forms import pictures_of
from roll.data.pictures.parts import parts_of, text_of_parts, with_pictures
from roll.data.pictures.picture import Picture, pictures_in
from roll.data.preparation.templates import turns_of, with_texts
from roll.data.spool import spooled


@dataclass(frozen=True, slots=True)
class RawRow:
    """Row of a file, as it was read.

    Example: RawRow("data/train.jsonl:17", {"prompt": "1+1", "answer": "2"})
    """

    place: str
    """File and line (or row) for error messages."""
    read: Mapping[str, Any] | RowError
    """Values of its columns; or why they could not be read. A reader goes on after such a row."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of its columns. RowError if they could not be read."""
        if isinstance(self.read, RowError):
            raise self.read
        return self.read


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Row with its columns mapped to fields; exactly one of `prompt` and `messages` is set: for a
    prompt with pictures, `messages`."""

    place: str
    prompt: str | None
    messages: tuple[Message, ...] | None
    answer: str
    """Reference answer; empty if the source has no answer column."""
    tag: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values of all columns that are not mapped, by column name; large ones are on disk."""

    @property
    def asked(self) -> tuple[Message, ...]:
        """The messages, or the prompt as one."""
        return self.messages or (Message(role="user", content=self.prompt or ""),)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Pictures in the messages, in order."""
        return pictures_in(self.messages or ())


def map_row(row: RawRow, source: SourceConfig) -> PromptRow:
    """Convert a row by the configured columns of its source.

    Raises:
        DataError: a column is missing or holds the wrong type.
    """
    columns = source.columns
    # Columns that a text names stay, because rewards may read them.
    used = source.mapped
    require_columns(row.values, source, row.place)
    values = with_texts(row.values, source, row.place)
    prompt = None if columns.prompt is None else text_of(values, columns.prompt, row.place)
    messages = None
    if isinstance(columns.messages, tuple):
        messages = turns_of(columns.messages, values, row.place)
    elif columns.messages is not None:
        where = f"{row.place}: column {columns.messages!r}"
        messages = messages_of(values[columns.messages], where, folder_of(source))
    pictures = pictures_of_column(row, columns.images, source)
    if messages is not None:
        messages = with_pictures(messages, pictures, row.place)
    elif pictures is not None:
        asked = (Message(role="user", content=prompt or ""),)
        filled = with_pictures(asked, pictures, row.place)
        prompt, messages = (None, filled) if pictures else (prompt, None)
    return PromptRow(
        place=row.place,
        prompt=prompt,
        messages=messages,
        answer="" if columns.answer is None else _answer(values, columns.answer, row.place),
        tag=source.tag if columns.tag is None else text_of(values, columns.tag, row.place),
        extra=spooled({name: each for name, each in values.items() if name not in used}),
    )


def pictures_of_column(
    row: RawRow, name: str | None, source: FileConfig
) -> tuple[Picture, ...] | None:
    """Return the pictures of a row's column; None if the source has none (`name` is None). The
    errors are those of `pictures_of`."""
    if name is None:
        return None
    return pictures_of(row.values[name], f"{row.place}: column {name!r}", folder_of(source))


def folder_of(source: FileConfig) -> Path:
    """Return the folder to which paths in a source are relative: that of its file."""
    return Path(source.path).expanduser().parent


def map_task(row: RawRow, source: TaskSource) -> PromptRow:
    """Convert a row of a file of tasks. Its column `seed`, if it has one that is not mapped, is the
    seed of the task.

    Raises:
        DataError: a column is missing or holds the wrong type, or `seed` is no seed.
    """
    found = map_row(row, source)
    if found.pictures:
        raise RowError(f"{row.place}: has pictures; tasks of environments take none")
    if "seed" in found.extra and not _is_seed(found.extra["seed"]):
        raise RowError(
            f"{row.place}: column 'seed', with which the environment begins the task, must be a "
            f"whole number from 0 to {MAX_SEED}, found {show(found.extra['seed'])}; correct it, or "
            "give the column another name"
        )
    return found


def _is_seed(value: Any) -> bool:
    """Return whether a value is a whole number from 0 to `MAX_SEED`, also as text or as a float, as
    CSV and Parquet files hold it."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(0 <= value <= MAX_SEED and value == int(value))


def require_columns(found: Iterable[str], source: FileConfig, place: str) -> None:
    """Check that every configured column exists.

    Args:
        found: names of the columns that exist.
        place: file and row, for the error message.

    Raises:
        DataError: a column is missing; the message names the nearest existing one.
    """
    have = list(found)
    for name in source.columns_used:
        if name not in have:
            raise RowError(
                f"{place}: no column {name!r}{nearest(name, have)} (columns: "
                f"{', '.join(sorted(have)) or 'none'}); set `columns` of this source"
            )


def text_of(values: Mapping[str, Any], name: str, place: str) -> str:
    """Return the text in column `name`.

    Raises:
        DataError: the value is not text, or it is blank.
    """
    value = values[name]
    if not isinstance(value, str):
        raise RowError(f"{place}: column {name!r} must be text, found {show(value)}")
    if not value.strip():
        raise RowError(f"{place}: column {name!r} is empty; give it a text or remove the row")
    return value


def _answer(values: Mapping[str, Any], name: str, place: str) -> str:
    """Return the answer of a row as text; DataError unless it is text, a number or a bool (NaN is
    none)."""
    value = values[name]
    # Parquet files that pandas wrote hold NaN where an answer is missing.
    missing = isinstance(value, float) and math.isnan(value)
    if isinstance(value, (str, bool, int, float)) and not missing:
        return str(value)
    raise RowError(
        f"{place}: column {name!r} must be text or a number, found {show(value)}; where a source "
        "has no answers, set `columns.answer: null`"
    )


def messages_of(value: Any, where: str, folder: Path) -> tuple[Message, ...]:
    """Convert a list of messages, or its JSON text, to `Message`s. The content of a message may be
    a list of parts, with pictures.

    Args:
        where: file, row and column, with which the error message begins.
        folder: folder of the file, to which paths of pictures are relative.

    Raises:
        DataError: the value is no such list or is empty, or a message has keys other than role and
            content.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"{where} is text but not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # a number too long, too many brackets
            raise RowError(f"{where} is JSON that cannot be read: {error}") from None
    if not isinstance(value, Sequence) or not value or isinstance(value, str):
        raise RowError(f"{where} must be a list of {{role, content}}, found {show(value)}")
    return tuple(_message(item, f"{where}[{i}]", folder) for i, item in enumerate(value))


_MESSAGE = ("role", "content")


def _message(item: Any, where: str, folder: Path) -> Message:
    """Convert one message; arguments and errors are those of `messages_of`."""
    if not isinstance(item, Mapping):
        raise RowError(f"{where} must be {{role, content}}, found {show(item)}")
    content = item.get("content")
    in_parts = isinstance(content, Sequence) and not isinstance(content, str)
    for key in ("role",) if in_parts else _MESSAGE:
        if not isinstance(item.get(key), str):
            raise RowError(f"{where}.{key} must be text, found {show(item.get(key))}")
    more = sorted(key for key in item if key not in _MESSAGE and item[key] is not None)
    if more:
        raise RowError(
            f"{where} has {more[0]!r}, which would be lost (known: role, content); "
            "put it into the content, or drop it"
        )
    if not in_parts:
        return Message(role=item["role"], content=item["content"])
    parts = parts_of(item["content"], f"{where}.content", folder)
    text = text_of_parts(parts)
    # Texts alone are no parts: templates of models that see no pictures take no lists.
    only_texts = all(isinstance(part, str) for part in parts)
    return Message(role=item["role"], content=text, parts=() if only_texts else parts)


def show(value: Any) -> str:
    """Return the type and the shortened value, for an error message."""
    text = repr(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return "nothing (null)" if value is None else f"{type(value).__name__} {short}"
