"""Plain values as text, with their exact types, between a program and those who judge it."""

from __future__ import annotations

import json
from typing import Any

ENCODE = """
def encode(value, depth=0):
    kind = type(value)
    if depth > 100:
        raise ValueError("nested more than 100 deep")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(each, depth + 1) for each in value]]
    if kind is dict:
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]
        return ["dict", pairs]
    raise TypeError(f"a value of type {kind.__name__}, which is not plain")
"""
"""Source of `encode`, for the sandbox. Subclasses, such as an int of its own, are not plain."""

DECODE = """
def decode(found):
    if found is None or type(found) in (bool, str):
        return found
    kind, inner = found
    if kind == "int":
        return int(inner, 16)
    if kind in ("float", "complex"):
        return {"float": float, "complex": complex}[kind](inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in inner}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](
        [decode(each) for each in inner]
    )
"""
"""Source of `decode`, the way back; ValueError, TypeError or KeyError for anything else."""

_namespace: dict[str, Any] = {}
exec(ENCODE + DECODE, _namespace)


def encode(value: Any) -> str:
    """Return a plain value as text.

    Raises:
        TypeError: it is not plain.
    """
    return json.dumps(_namespace["encode"](value))


def decode(text: str) -> Any:
    """Return the value that `encode` has written.

    Raises:
        ValueError: `text` is none that it could have written.
    """
    try:
        return _namespace["decode"](json.loads(text))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no encoded value: {error}") from error


def same(expected: Any, found: Any) -> bool:
    """Return whether two plain values are equal, and of equal types at every depth.

    Two values that are not a number count as equal.
    """
    if type(expected) is not type(found):
        return False
    if isinstance(expected, dict):
        return len(expected) == len(found) and all(
            key in found and same(value, found[key]) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        pairs = zip(expected, found, strict=False)
        return len(expected) == len(found) and all(same(a, b) for a, b in pairs)
    both_nan = isinstance(expected, float) and expected != expected and found != found
    return bool(both_nan or expected == found)
