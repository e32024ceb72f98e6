"""Instructions of a data row: their ids and arguments, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

RELATIONS = ("less than", "at least")
"""Values of the arguments `relation`, `let_relation` and `capital_relation`."""

Parse = Callable[[object], Any]
"""Function that returns the value of an argument, or raises ValueError with what was expected."""


def text(value: object) -> str:
    """Return a text that is not empty; ValueError for anything else."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Return a list of at least one text; a single text is a list of one.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, str):
        return (text(value),)
    if not isinstance(value, Iterable):
        raise ValueError("expected a list of texts")
    found = tuple(text(each) for each in value)
    if not found:
        raise ValueError("expected a list of at least one text")
    return found


def whole_number(value: object) -> int:
    """Return a whole number from 0, also from a float, as columns with gaps hold it.

    Raises:
        ValueError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("expected a whole number")
    if value < 0:
        raise ValueError("expected a number from 0")
    return int(value)


def relation(value: object) -> str:
    """Return one of `RELATIONS`; ValueError for anything else."""
    if value not in RELATIONS:
        raise ValueError(f"expected one of {', '.join(map(repr, RELATIONS))}")
    return str(value)


def list_of(value: object) -> list[Any]:
    """Return a column as a list: a list, an array, or the JSON text of one.

    Raises:
        ValueError: the column is none of these.
    """
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return list(value)


def arguments_of(instruction: str, given: object, known: Mapping[str, Parse]) -> dict[str, Any]:
    """Return the arguments of one instruction.

    Args:
        instruction: id of the instruction, for messages.
        given: arguments in the row: a mapping or the JSON text of one. None, and values of None,
            are left out, because a data set has the arguments of all instructions in each row.
        known: names and types of the arguments of this instruction.

    Raises:
        ValueError: an argument is missing, is not known or has another type.
    """
    if isinstance(given, str):
        given = json.loads(given)
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{instruction}: expected a mapping, found {type(given).__name__}")
    values = {name: value for name, value in (given or {}).items() if value is not None}
    for name in known:
        if name not in values:
            raise ValueError(f"{instruction}: the argument {name!r} is missing")
    parsed = {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"{instruction}: has no argument {name!r} ({', '.join(known) or 'none'})"
            )
        try:
            parsed[name] = known[name](value)
        except ValueError as error:
            raise ValueError(f"{instruction}: {name} is {value!r:.60}, {error}") from None
    return parsed
