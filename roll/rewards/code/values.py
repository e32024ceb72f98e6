"""Plain values as text, with their exact types, between a program and those who judge it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MOST_ITEMS = 100_000
"""Items of an iterator that are told."""
_MOST_ALIKE = 100
"""Keys with the same hash. Each costs a comparison with all of them."""

ENCODE = f"""
import collections as _c, datetime as _d, decimal as _m, fractions as _f, itertools as _i

_SEQUENCES = {{list, tuple, set, frozenset, _c.deque}}
_DICTS = {{dict, _c.OrderedDict, _c.Counter, _c.defaultdict}}
_VIEWS = (type({{}}.keys()), type({{}}.values()), type({{}}.items()))
_ITERATORS = (map, filter, zip, enumerate, reversed, type(_ for _ in ()), type(iter([])),
    type(iter(())), type(iter(range(0))), type(iter({{}})), type(iter(set())), type(iter("")),
    type(reversed([])), _i.chain, _i.islice, _i.accumulate, _i.product, _i.permutations,
    _i.combinations, _i.takewhile, _i.dropwhile, _i.starmap, _i.count, _i.cycle, _i.repeat)

def encode(value, depth=0, other=None):
    kind = type(value)
    if depth > 100:
        raise ValueError("nested more than 100 deep")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return ["int", hex(value)]
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind in _SEQUENCES:
        return [kind.__name__, [encode(each, depth + 1, other) for each in value]]
    if kind in _DICTS:
        return [kind.__name__, [
            [encode(k, depth + 1, other), encode(v, depth + 1, other)] for k, v in value.items()
        ]]
    if kind in (_f.Fraction, _m.Decimal):
        return [kind.__name__, str(value)]
    if kind is range:
        return ["range", [value.start, value.stop, value.step]]
    if kind is _d.timedelta:
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    if kind in (_d.date, _d.time, _d.datetime) and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, value.isoformat()]
    if kind in _VIEWS:
        return [kind.__name__, [encode(each, depth + 1, other) for each in value]]
    if kind in _ITERATORS:
        items = [encode(each, depth + 1, other) for each in _i.islice(value, {MOST_ITEMS})]
        return ["iterator", items]
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        return encode(value.tolist(), depth + 1, other)
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__bases__ == (tuple,):
        items = [encode(each, depth + 1, other) for each in tuple.__iter__(value)]
        return ["namedtuple", [str(kind.__name__), [str(each) for each in kind._fields], items]]
    if other is not None:
        return other(value)
    raise TypeError(f"a value of type {{kind.__name__}}, which is not plain")
"""
"""Source of `encode`, for the sandbox. `other` encodes what is not plain. Subclasses, such as an
int of the program's own, are not plain, but for named tuples."""

DECODE = """
import collections as _c, datetime as _d, decimal as _m, fractions as _f

def _named_tuple(inner):
    name, fields, items = inner
    return _c.namedtuple(name, fields)(*items)

def _keys(items):
    return items

def _dict(pairs):
    _keys([key for key, _ in pairs])
    return dict(pairs)

_MADE = {
    "list": list, "tuple": tuple, "deque": _c.deque, "iterator": iter,
    "set": lambda items: set(_keys(items)),
    "frozenset": lambda items: frozenset(_keys(items)),
    "dict_keys": lambda items: dict.fromkeys(_keys(items)).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: _dict(items).items(),
}
_MAPPED = {
    "dict": dict, "OrderedDict": _c.OrderedDict, "Counter": _c.Counter,
    "defaultdict": lambda found: _c.defaultdict(None, found),
}
_READ = {
    "int": lambda text: int(text, 16), "float": float, "complex": complex,
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
    "Fraction": _f.Fraction, "Decimal": _m.Decimal,
    "range": lambda inner: range(*inner), "timedelta": lambda inner: _d.timedelta(*inner),
    "date": _d.date.fromisoformat, "time": _d.time.fromisoformat,
    "datetime": _d.datetime.fromisoformat,
}

def decode(found, other=None):
    if found is None or type(found) in (bool, str):
        return found
    kind, inner = found
    if kind in _READ:
        return _READ[kind](inner)
    if kind in _MAPPED:
        return _MAPPED[kind](_dict([(decode(k, other), decode(v, other)) for k, v in inner]))
    if kind == "namedtuple":
        return _named_tuple([inner[0], inner[1], [decode(each, other) for each in inner[2]]])
    if kind in _MADE:
        return _MADE[kind]([decode(each, other) for each in inner])
    if other is None:
        raise KeyError(kind)
    return other(found)
"""
"""Source of `decode`, the way back; an exception for anything else. `other` decodes what `encode`'s
`other` has encoded."""

_namespace: dict[str, Any] = {}
exec(ENCODE + DECODE, _namespace)
# What comes from a program is decoded here, too: no power of ten that fills the memory, no class.
for _costly in ("Fraction", "Decimal"):
    del _namespace["_READ"][_costly]
_namespace["_named_tuple"] = lambda inner: tuple(inner[2])


def _spread(keys: list[Any]) -> list[Any]:
    """Return the keys of a set or dict, unless they were chosen so that it takes long to make."""
    hashes = Counter(map(hash, keys))
    if hashes and max(hashes.values()) > _MOST_ALIKE:
        raise ValueError(f"more than {_MOST_ALIKE} keys have one hash")
    return keys


_namespace["_keys"] = _spread


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
    except (ArithmeticError, AttributeError, KeyError, TypeError, RecursionError) as error:
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
