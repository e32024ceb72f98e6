"""Writer of plain values as JSON: nested containers have one line per item, flat lists one line.

A state may hold millions of tokens. The standard library's encoder that indents is written in
Python and slow. The encoder that does not indent is written in C and fast, but blocks all threads
while it runs. Here each flat list goes to the fast encoder by itself, so that threads are blocked
for no longer than one list takes (`benchmarks/run_state.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write_plain(path: Path, value: Any) -> None:
    """Write `value` to `path` and force it to disk; the keys of all dicts must be strings.

    Raises:
        OSError: the disk is full, or another error of the disk.
        TypeError: `value` contains something that JSON cannot hold.
    """
    with path.open("w", encoding="utf-8") as file:
        file.writelines(encoded(value))
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def encoded(value: Any, indent: int = 0) -> Iterator[str]:
    """Yield the JSON text of `value` in pieces."""
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
        yield from encoded(item, indent + 1)
    yield "\n" + " " * indent + ("}" if opened else "]")


def _holds_others(value: Any) -> bool:
    """Return True if a container holds another one, or a key that must be refused."""
    if isinstance(value, dict):
        return not all(isinstance(key, str) for key in value) or _any_container(value.values())
    return isinstance(value, list | tuple) and _any_container(value)


def _any_container(values: Iterable[Any]) -> bool:
    """Return True if one of the values is a container; fast, as there may be millions of values."""
    return any(issubclass(kind, dict | list | tuple) for kind in set(map(type, values)))
