"""Plain values as a JSON file: what holds others is opened, a line for each; flat lists stay whole.

A state may hold millions of tokens. The encoder of the standard library that indents is written in
Python and slow. The other one is written in C and fast, but all threads wait for it. Flat lists go
to that one, a list at a time, so that nobody waits for longer than one list takes
(`benchmarks/run_state.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_plain(path: Path, value: Any) -> None:
    """Write `value` in place; dicts have strings for keys.

    Raises:
        OSError: the disk is full, or something else is wrong with it.
        TypeError: it holds something that JSON does not know.
    """
    with path.open("w", encoding="utf-8") as file:
        file.writelines(encoded(value))
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def encoded(value: Any, indent: int = 0) -> Iterator[str]:
    """The text, in pieces."""
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
    if isinstance(value, dict):
        return any(_is_container(each) for each in value.values())
    # Lists are of one kind; where one is not, it is written whole, which is as right.
    return isinstance(value, list | tuple) and len(value) > 0 and _is_container(value[0])


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
