"""Rules for classes that users bring, checked before an object of them is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

from roll.config.errors import ConfigError

EMPTY = inspect.Parameter.empty
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_class(kind: str, found: type[BaseModel]) -> None:
    """Check a class that derives from a base of `roll.extend`.

    Args:
        kind: import path of the class, for the message.
        found: the class.

    Raises:
        ConfigError: it lacks a method, has one with another signature than its base, or defines
            `__init__`, though its options are fields.
    """
    if missing := getattr(found, "__abstractmethods__", None):
        raise ConfigError(f"{kind} has no method {', '.join(sorted(missing))}")
    if found.__init__ is not BaseModel.__init__:
        raise ConfigError(
            f"{kind} defines __init__; options are fields with types, "
            f"`{_as_field(found.__init__)}` (docs/extend.md)"
        )
    for name, wanted in _methods_of_bases(found):
        given = inspect.getattr_static(found, name)
        if given is not wanted and inspect.isfunction(given) and not stands_in(given, wanted):
            raise ConfigError(
                f"{kind}: {signature_of(name, given)} cannot be called as its base is; expected "
                f"{signature_of(name, wanted)}"
            )


def public_base(found: type) -> str:
    """Return the name of the first base of a class that is the framework's; empty if none is."""
    ours = (base for base in found.__mro__ if base.__module__.startswith("roll."))
    return next((base.__name__ for base in ours), "")


def _as_field(init: Callable[..., Any]) -> str:
    """Return the field that stands for the first option of an `__init__`: `limit: float = 2.0`."""
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.default is not EMPTY:
            known = parameter.annotation is not EMPTY
            noted = parameter.annotation if known else type(parameter.default)
            noted = noted.__name__ if isinstance(noted, type) else noted
            return f"{parameter.name}: {noted} = {parameter.default!r}"
    return "option: float = 1.0"


def _methods_of_bases(found: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods, and `__call__`, of the framework's classes among the bases."""
    for base in found.__mro__[1:]:
        if base.__module__.startswith("roll."):
            for name, method in vars(base).items():
                public = not name.startswith("_") or name == "__call__"
                if public and inspect.isfunction(method):
                    yield name, method


def stands_in(given: Callable[..., Any], wanted: Callable[..., Any]) -> bool:
    """Return whether a method can be called as another one: with all arguments, and with only those
    that have no default, by place or, where these are keywords only, by name."""
    if inspect.iscoroutinefunction(given) and not inspect.iscoroutinefunction(wanted):
        return False
    parameters = inspect.signature(wanted).parameters.values()
    for least in (False, True):
        chosen = [p for p in parameters if not (least and p.default is not EMPTY)]
        by_place = [p.name for p in chosen if p.kind in POSITIONAL]
        by_name = {p.name: None for p in chosen if p.kind is inspect.Parameter.KEYWORD_ONLY}
        try:
            inspect.signature(given).bind(*by_place, **by_name)
        except TypeError:
            return False
    return True


def signature_of(name: str, method: Callable[..., Any]) -> str:
    """Return a method as its definition says it: `chance(self, prompt: Prompt) -> float`."""
    before = "async " if inspect.iscoroutinefunction(method) else ""
    return f"`{before}{name}{inspect.signature(method)}`".replace("'", "")
