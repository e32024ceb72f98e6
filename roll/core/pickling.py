"""Quick pickling of the small values of which a step has thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

_GETTERS: dict[type, Any] = {}
"""Class that `pickle_by_fields` has changed -> function that returns its fields as a tuple."""


def pickle_by_fields(cls: type[T]) -> type[T]:
    """Let pickle store the fields of a dataclass, and make instances by a call of the class with
    their values, in order.

    By default, a frozen dataclass with slots looks up its fields for each instance, in Python,
    which takes several times as long.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    get = attrgetter(*names)
    _GETTERS[cls] = get if len(names) > 1 else lambda self: (get(self),)

    def reduced(self: T) -> tuple[Any, ...]:
        if type(self) is cls:
            return cls, _GETTERS[cls](self)
        own = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, name) for name in own)  # a subclass may have more

    cls.__reduce__ = reduced  # type: ignore[method-assign, assignment]
    return cls


class Columns(list[T]):
    """A list that pickle stores by columns, and that arrives as a plain list.

    If all values are different objects of one class, which `pickle_by_fields` has changed, pickle
    gets one list for each field, in place of a call for each value; columns of such values
    likewise. An object that is in a list more than once arrives as one object, as it always does.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _joined, _divided(list(self))


def _divided(values: Sequence[Any]) -> tuple[type | None, Sequence[Any]]:
    """Return the class of the values and, for each field, such a pair of its values; or None and
    the values as they are, if they cannot be stored by columns."""
    kind = type(values[0]) if values else None
    get = None if kind is None else _GETTERS.get(kind)
    if get is None or any(type(value) is not kind for value in values):
        return None, values
    if len(set(map(id, values))) < len(values):
        return None, values
    return kind, [_divided(column) for column in zip(*map(get, values), strict=True)]


def _joined(kind: type | None, columns: Sequence[Any]) -> list[Any]:
    """Return the values from the pair that `_divided` has made of them."""
    if kind is None:
        return list(columns)
    return [kind(*row) for row in zip(*(_joined(*column) for column in columns), strict=True)]
