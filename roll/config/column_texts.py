"""Texts that name columns of a row in braces, and turns of conversations that are made of them."""

from __future__ import annotations

from string import Formatter
from typing import Annotated

from pydantic import AfterValidator

from roll.config.base import Config


def columns_in(text: str) -> tuple[str, ...]:
    """Return the columns that a text names in braces; none for the name of a column.

    Raises:
        ValueError: the braces are not in pairs, or hold more than the name of a column.
    """
    try:
        found = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; a brace itself is written twice") from None
    for name, how, conversion in found:
        if not name or how or conversion:
            raise ValueError(f"{text!r}: braces hold the name of a column, as in '{{question}}'")
    return tuple(str(name) for name, _, _ in found)


def _checked(text: str) -> str:
    columns_in(text)
    return text


Column = Annotated[str, AfterValidator(_checked)]
"""Name of a column, or a text with names of columns in braces: `Question: {question}`."""


class TurnConfig(Config):
    """Turn of a conversation that is made of columns."""

    role: str
    """Speaker of the turn, as the chat template names it: `system`, `user`, `assistant`."""
    content: Column
    """Text with names of columns in braces. The turn is left out of rows in which all of them are
    empty."""
