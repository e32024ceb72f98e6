"""Things that all formats of calls share: calls, malformed calls, and the parsed turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]
    typed: bool = True
    """False if the format writes every argument as text. The schema of the tool then says which of
    them are numbers, lists and so on."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that begins as a call and is none."""

    text: str
    reason: str
    """What was found and what is expected, for the policy to read."""
    name: str = ""
    """Name of the tool if it could be read."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn of the policy, taken apart."""

    text: str
    """Text outside of the calls, without white space around it."""
    calls: tuple[Call | Malformed, ...] = ()
    """Calls in the order in which they were written."""


class Format(Protocol):
    """Format in which a family of models writes calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of a call. Some tokenizers hold them as special tokens, which an environment sees
        with `special_tokens: show` only."""
        ...

    def parse(self, text: str) -> Parsed:
        """Take apart a turn that was not cut. Never raises."""
        ...


def call_of(text: str, keys: tuple[str, ...] = ("arguments", "parameters")) -> Call | Malformed:
    """Return the call that a JSON object `{"name": ..., "arguments": {...}}` describes.

    Args:
        text: the JSON text.
        keys: names that the arguments may have; the first is that of the message.
    """
    try:
        found = loads(text)
    except ValueError as error:
        return Malformed(text, f"the call is not valid JSON: {error}")
    return call_of_value(found, text, keys)


def call_of_value(
    found: Any, text: str, keys: tuple[str, ...] = ("arguments", "parameters")
) -> Call | Malformed:
    """Return the call that a JSON value describes; see `call_of`."""
    if not isinstance(found, dict):
        return Malformed(text, f"a call must be a JSON object, found {_kind(found)}")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return Malformed(text, 'a call must have a "name", which is a text')
    key = next((each for each in keys if each in found), None)
    if key is None:
        return Malformed(text, f'the call of {name!r} has no "{keys[0]}"', name)
    return arguments_of(name, found[key], text)


def arguments_of(name: str, arguments: Any, text: str) -> Call | Malformed:
    """Return the call of a tool with arguments that are a JSON object, or the text of one.

    Args:
        text: text of the whole call, kept if it is malformed.
    """
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            return Malformed(text, f"the arguments of {name!r} are not valid JSON: {error}", name)
    if not isinstance(arguments, dict):
        found = _kind(arguments)
        return Malformed(text, f"the arguments of {name!r} must be an object, found {found}", name)
    return Call(name, arguments)


def loads(text: str) -> Any:
    """Return a JSON value. Line ends may stand in strings, where models often write them.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def first_value(text: str, begin: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and the place behind it. White space
    may stand before it.

    Raises:
        ValueError: there is none.
    """
    while text[begin : begin + 1].isspace():
        begin += 1
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_json(value: Any) -> bool:
    """Return whether a value is one that JSON has, and can be written: Python has more kinds, and
    numbers that are too long to write."""
    try:
        return bool(json.loads(json.dumps(value, sort_keys=True, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def leading(pattern: re.Pattern[str], text: str) -> tuple[list[re.Match[str]], str]:
    """Return the matches with which a text begins, one behind the other, and the rest without white
    space around it.

    It ends at the first mistake, so the time is in proportion to the length of the text; a search
    for further matches may run through the whole rest from every opening mark.
    """
    found: list[re.Match[str]] = []
    at = 0
    while match := pattern.match(text, at):
        found.append(match)
        at = match.end()
    return found, text[at:].strip()


def _kind(value: Any) -> str:
    """Return the kind of a JSON value in words, with its article."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a bool", type(None): "null"}
    return names.get(type(value), "a number")
