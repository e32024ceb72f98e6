"""Writer of plain values as JSON, with a binary file for arrays.

Nested containers have one line per item, flat lists one line. Arrays of numbers, such as the
millions of tokens of samples that wait, go to a second file; the JSON says where they are in it.

The standard library's encoder that indents is written in Python and slow. The encoder that does not
indent is written in C and fast, but blocks all threads while it runs. Here each flat list goes to
the fast encoder by itself, so that threads are blocked for no longer than one list takes
(`benchmarks/run_state.py`).
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

ARRAY_FILE = "arrays.bin"
"""Name of the file with the arrays, beside the JSON; missing if there are none."""
ARRAY_TYPES = ("i", "f")
"""Type codes of the arrays that can be written: int32 and float32."""
_KEY = "__array__"
"""Only key of the JSON object that stands for an array. Its value is a list: type code, position of
the first item in the file in bytes, and number of items."""

Store = Callable[["array[Any]"], dict[str, Any]]
"""Function that stores an array and returns the JSON object that stands for it."""


def write_plain(path: Path, value: Any) -> None:
    """Write `value` to `path`, and its arrays to `ARRAY_FILE` beside it; force both to disk.

    A function without arguments stands for what it returns, and is called only when that is
    written. So not all that is written needs to be in memory at the same time.

    Raises:
        OSError: the disk is full, or another error of the disk.
        TypeError: `value` contains something that cannot be written: a key that is no string, an
            array of another type than `ARRAY_TYPES`, or an unknown object.
    """
    with path.open("w", encoding="utf-8") as file, path.with_name(ARRAY_FILE).open("wb") as arrays:
        file.writelines(encoded(value, _store(arrays)))
        file.write("\n")
        for each in (file, arrays):
            each.flush()
            os.fsync(each.fileno())
        empty = not arrays.tell()
    if empty:
        path.with_name(ARRAY_FILE).unlink()


def read_arrays(value: Any, folder: Path) -> Any:
    """Return a value that was read from JSON, with the arrays that `write_plain` put beside it.

    Args:
        value: the value, or a part of it.
        folder: folder of the JSON file.

    Raises:
        OSError: the file with the arrays cannot be read.
        ValueError: the file does not hold what the value says.
    """
    path = folder / ARRAY_FILE
    with path.open("rb") if path.exists() else BytesIO() as file:
        return _with_arrays(value, file, path)


def _with_arrays(value: Any, file: BinaryIO, path: Path) -> Any:
    """Return `value` with arrays, read from `file`, in place of the objects that stand for them;
    ValueError, which names `path`, if an array is not in the file."""
    if isinstance(value, list):
        return [_with_arrays(item, file, path) for item in value]
    if not isinstance(value, dict):
        return value
    place = value.get(_KEY)
    if len(value) != 1 or not isinstance(place, list):
        return {key: _with_arrays(item, file, path) for key, item in value.items()}
    kind, at, length = place if len(place) == 3 else ("", 0, 0)
    if kind not in ARRAY_TYPES or not all(type(n) is int and n >= 0 for n in (at, length)):
        raise ValueError(f"{value} names no array of {path}")
    items = array(kind)
    size = length * items.itemsize
    if at + size > file.seek(0, os.SEEK_END):  # before memory is taken for what is not there
        raise ValueError(f"{path} ends before the array {value}")
    file.seek(at)
    items.frombytes(file.read(size))
    return items


def _store(file: BinaryIO) -> Store:
    """Return a function that appends arrays to a file."""

    def store(values: array[Any]) -> dict[str, Any]:
        if values.typecode not in ARRAY_TYPES:
            raise TypeError(f"arrays of type {values.typecode!r} cannot be written")
        place = {_KEY: [values.typecode, file.tell(), len(values)]}
        file.write(values)
        return place

    return store


def encoded(value: Any, store: Store, indent: int = 0) -> Iterator[str]:
    """Yield the JSON text of `value` in pieces; call functions in it, and `store` for each array.

    Args:
        indent: number of spaces before the line in which the value begins.

    Raises:
        TypeError: a key is no string, or an object is unknown to JSON.
    """
    if callable(value):
        value = value()
    if isinstance(value, array):
        value = store(value)
    if not _holds_others(value):
        yield json.dumps(value, separators=(", ", ": "))
        return
    opened = isinstance(value, dict)
    yield "{" if opened else "["
    pad = "\n" + " " * (indent + 1)
    for number, item in enumerate(value.items() if opened else value):
        yield f",{pad}" if number else pad
        if opened:
            key, item = item
            if not isinstance(key, str):
                raise TypeError(f"keys of JSON are strings, not {key!r}")
            yield f"{json.dumps(key)}: "
        yield from encoded(item, store, indent + 1)
    yield "\n" + " " * indent + ("}" if opened else "]")


def _holds_others(value: Any) -> bool:
    """Return True if a container holds another one, or a key that must be refused."""
    if isinstance(value, dict):
        return not all(isinstance(key, str) for key in value) or _any_container(value.values())
    return isinstance(value, list | tuple) and _any_container(value)


def _any_container(values: Iterable[Any]) -> bool:
    """Return True if one of the values is a container; fast, as there may be millions of values."""
    kinds = set(map(type, values))
    return any(issubclass(kind, dict | list | tuple | array | Callable) for kind in kinds)
