"""`pickle_by_fields`: quick pickling of the small values of which a step has thousands."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def pickle_by_fields(cls: type[T]) -> type[T]:
    """Let pickle store the fields of a dataclass, and make instances by a call of the class with
    their values, in order.

    By default, a frozen dataclass with slots looks up its fields for each instance, in Python,
    which takes several times as long.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    get = attrgetter(*names)

    def reduced(self: T) -> tuple[Any, ...]:
        if type(self) is not cls:  # a subclass may have more fields
            return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        values = get(self)
        return cls, values if len(names) > 1 else (values,)

    cls.__reduce__ = reduced  # type: ignore[method-assign, assignment]
    return cls
