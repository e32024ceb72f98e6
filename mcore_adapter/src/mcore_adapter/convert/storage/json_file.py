"""JSON files of users. Any content is either read or rejected with a clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcore_adapter.errors import ConversionError


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConversionError: the file is missing or unreadable, or holds anything but one object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConversionError(f"{path} is missing") from error
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConversionError(f"{path} is nested too deeply for what it should hold") from None
    except ValueError as error:
        raise ConversionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} holds {type(found).__name__}, expected an object")
    return found


def parse_once(text: bytes) -> Any:
    """Parse JSON in which no object has the same key twice.

    Raises:
        ValueError: the text is no JSON, is nested too deeply, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; raise ValueError if they have a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice in it")
    return found
