"""Texts and conversations that are made of several columns of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from roll.config.column_texts import TurnConfig, columns_in
from roll.config.sections.data import FileConfig
from roll.core.errors import RowError
from roll.core.types import Message


def with_texts(values: Mapping[str, Any], source: FileConfig, place: str) -> Mapping[str, Any]:
    """Return the columns of a row, and the texts that the source makes of them: each has its
    template as the name of its column. DataError as in `filled`."""
    if not source.templates:
        return values
    return {**values, **{each: filled(each, values, place) for each in source.templates}}


def turns_of(
    turns: Sequence[TurnConfig], values: Mapping[str, Any], place: str
) -> tuple[Message, ...]:
    """Return the messages that the source makes of a row. A turn is left out if it names columns
    and all of them are empty.

    Raises:
        DataError: a column holds neither text nor a number, or no turn is left.
    """
    found = []
    for turn in turns:
        named = columns_in(turn.content)
        if named and all(values[name] is None or values[name] == "" for name in named):
            continue
        found.append(Message(role=turn.role, content=filled(turn.content, values, place)))
    if not found:
        raise RowError(f"{place}: all columns of `columns.messages` are empty; remove the row")
    return tuple(found)


def filled(template: str, values: Mapping[str, Any], place: str) -> str:
    """Return a text with the values of the columns that it names in braces.

    Raises:
        DataError: a column holds neither text nor a number.
    """
    parts = []
    for text, name, _, _ in Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        if not isinstance(values[name], str | int | float):
            raise RowError(
                f"{place}: column {name!r}, which {template!r} names, must be text or a number, "
                f"found {values[name]!r:.60}"
            )
        parts.append(str(values[name]))
    return "".join(parts)
