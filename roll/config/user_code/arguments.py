"""Arguments that a run file gives to code, compared with its signature and its annotations."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from roll.config.errors import ConfigError


def check_arguments(
    called: Callable[..., Any], given: int, kwargs: Mapping[str, Any], *, where: str, what: str
) -> None:
    """Raise ConfigError unless code takes the arguments of a run file. It is not called.

    Args:
        called: function, or class.
        given: number of arguments that the framework gives it first.
        kwargs: arguments of the run file.
        where: key that holds them.
        what: name of the code, for messages.
    """
    try:
        signature = inspect.signature(called)
    except ValueError:
        return  # code in C without a readable signature
    try:
        signature.bind(*[None] * given, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)[given:]
        told = f"{error}; its arguments: {', '.join(names) or 'none'}"
        raise ConfigError(f"{where}: {what}: {told}") from None
    check_types(called, kwargs, where)


def check_types(called: Callable[..., Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a value of another type than its parameter is annotated with.

    Not judged are parameters without an annotation, those of types that pydantic does not know or
    that cannot be found, null where it is the default, and objects that no run file can hold.

    Args:
        called: function or class that takes `kwargs`.
        kwargs: arguments of the run file.
        where: key that holds them.
    """
    parameters = inspect.signature(called).parameters
    open_ended = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    for name, value in kwargs.items():
        parameter = parameters.get(name, open_ended)
        if parameter is None or (value is None and parameter.default is None):
            continue
        try:
            adapter = TypeAdapter(_annotation(parameter, called))
            json.dumps(value)
        except (PydanticUserError, NameError, TypeError):
            continue
        typed(adapter, value, f"{where}.{name}")


def typed(adapter: TypeAdapter[Any], value: Any, where: str) -> Any:
    """Return a value of a run file as a type. As in the rest of the file a whole number is a float,
    a list is a tuple, and a text is no number.

    Args:
        adapter: the type.
        where: key of the value.

    Raises:
        ConfigError: the value is of another type.
    """
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        # Of a union the member that fits best: the mistake lies deepest in the value.
        places = [(_within(value, each["loc"]), each) for each in error.errors()]
        deepest, found = max(places, key=lambda pair: len(pair[0]))
        alike = dict.fromkeys(each["msg"].lower() for keys, each in places if keys == deepest)
        place = ".".join(map(str, (where, *deepest)))
        raise ConfigError(f"{place}: found {found['input']!r:.60}; {'; or '.join(alike)}") from None


def _within(value: Any, place: tuple[int | str, ...]) -> list[int | str]:
    """Return the keys of a place that lead into the value; pydantic also names the members of a
    union there."""
    keys: list[int | str] = []
    for key in place:
        inner: Any = value if isinstance(value, dict) else {}
        if isinstance(value, list):
            inner = dict(enumerate(value))
        if key in inner:
            keys.append(key)
            value = inner[key]
    return keys


def _annotation(parameter: inspect.Parameter, called: Callable[..., Any]) -> Any:
    """Return the type of a parameter; Any without one, or if it is a text whose names are not in
    the module of the code, such as one imported for type checkers alone."""
    noted = parameter.annotation
    if noted is parameter.empty:
        return Any
    if not isinstance(noted, str):
        return noted
    module = sys.modules.get(getattr(called, "__module__", None) or "")
    holder: Any = SimpleNamespace(__annotations__={"noted": noted})
    try:
        return get_type_hints(holder, vars(module or sys), include_extras=True)["noted"]
    except Exception:  # noqa: BLE001 - an annotation may be any expression
        return Any
