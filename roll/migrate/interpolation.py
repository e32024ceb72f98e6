"""Replacement of `${...}` in a file of another framework, key by key: one that has no value is kept
as an `Unresolved`, so that its key alone cannot be translated."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str, ...]
_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a // b if isinstance(a, int) and a % b == 0 else a / b,
    "max": max,
    "min": min,
}


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Value of a key whose `${...}` has no value, and the reason."""

    text: str
    why: str


class UnresolvedError(Exception):
    """Says why a `${...}` has no value."""


class Interpolation:
    """Resolves the `${...}` of one tree of settings."""

    def __init__(self, tree: dict[str, Any]) -> None:
        """Begin with the merged content of the files, of which nothing is changed."""
        self._tree = tree
        self.referred: set[Path] = set()
        """Keys that some `${...}` refers to."""

    def resolved(self) -> dict[str, Any]:
        """Return the tree with each `${...}` replaced by its value, or by an `Unresolved`."""
        found = self._value(self._tree, (), ())
        assert isinstance(found, dict)
        return found

    def _value(self, node: Any, at: Path, open_keys: tuple[Path, ...]) -> Any:
        """Return `node`, the value of the key `at`, resolved.

        Args:
            open_keys: keys that are being resolved, to find circles.
        """
        if isinstance(node, dict):
            return {k: self._value(v, (*at, str(k)), open_keys) for k, v in node.items()}
        if isinstance(node, list):
            return [self._value(v, (*at, str(i)), open_keys) for i, v in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        try:
            return self._text(node, at, open_keys)
        except UnresolvedError as error:
            return Unresolved(node, str(error))

    def _text(self, text: str, at: Path, open_keys: tuple[Path, ...]) -> Any:
        """Return a text with its `${...}` replaced; a text that is one `${...}` becomes its value,
        whatever type that has."""
        begin = text.find("${")
        if begin < 0:
            return text
        depth, end = 0, begin
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0 and end > begin + 1:
                break
        else:
            raise UnresolvedError("a brace is missing")
        inner = self._text(text[begin + 2 : end], at, open_keys)
        value = self._one(str(inner), at, open_keys)
        if begin == 0 and end == len(text) - 1:
            return value
        if isinstance(value, dict | list):
            raise UnresolvedError("a mapping or list stands inside of a text")
        rest = self._text(text[end + 1 :], at, open_keys)
        return f"{text[:begin]}{'' if value is None else value}{rest}"

    def _one(self, inner: str, at: Path, open_keys: tuple[Path, ...]) -> Any:
        """Return the value of `${inner}`; UnresolvedError if it has none."""
        name, colon, rest = inner.partition(":")
        if colon and not name.startswith("."):
            return self._call(name.strip(), [part.strip() for part in rest.split(",")], open_keys)
        dots = len(inner) - len(inner.lstrip("."))
        start = at[: len(at) - dots] if dots else ()
        path = (*start, *(part for part in inner.strip().strip(".").split(".") if part))
        return self._at(path, open_keys)

    def _at(self, path: Path, open_keys: tuple[Path, ...]) -> Any:
        """Return the resolved value of a key; UnresolvedError if there is no such key."""
        dotted = ".".join(path)
        if path in open_keys:
            raise UnresolvedError(f"{dotted} refers to itself")
        node: Any = self._tree
        for i, part in enumerate(path):
            if isinstance(node, str) and "${" in node:
                node = self._value(node, path[:i], (*open_keys, path))
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                raise UnresolvedError(f"there is no key {dotted}")
        self.referred.add(path)
        found = self._value(node, path, (*open_keys, path))
        if isinstance(found, Unresolved):
            raise UnresolvedError(found.why)
        return found

    def _call(self, name: str, args: list[str], open_keys: tuple[Path, ...]) -> Any:
        """Return the value of `${name:args}` for the functions that mean the same on any machine;
        of an environment variable, the default that the file gives it."""
        if name in ("oc.env", "env"):
            if len(args) < 2:
                raise UnresolvedError(f"the environment variable {args[0]} has no default")
            return _scalar(args[1])
        if name == "oc.select":
            try:
                return self._at(tuple(args[0].split(".")), open_keys)
            except UnresolvedError:
                return _scalar(args[1]) if len(args) > 1 else None
        if name == "oc.decode":
            return _scalar(args[0])
        if name in _NUMBERS and len(args) == 2:
            left, right = map(_scalar, args)
            numbers = all(isinstance(each, int | float) for each in (left, right))
            if numbers and not (name == "div" and right == 0):
                value = _NUMBERS[name](left, right)
                if math.isfinite(value):
                    return value
        raise UnresolvedError(f"only its own framework knows {name!r}")


def _scalar(text: str) -> Any:
    """Return a text as YAML reads it; the text itself if that is no scalar."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, str | int | float | bool) or value is None else text
