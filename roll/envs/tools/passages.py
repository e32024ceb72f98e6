"""Passages of a corpus, and what a search for them asks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roll.core.errors import ConfigError
from roll.core.pickling import pickle_by_fields


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Query:
    """Search in one of the `corpora` of a run."""

    id: str
    corpus: str
    """Name of the corpus."""
    text: str
    count: int
    """Number of passages that are wanted."""


def read_passages(path: Path, text: str, title: str, limit: int | None = None) -> list[str]:
    """Return the passages of a corpus: lines of text, or the columns `title` and `text` of a JSONL
    file; at most the first `limit`. ConfigError if it cannot be read, or has no passage."""
    found = []
    try:
        with path.expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                jsonl = path.suffix == ".jsonl"
                found.append(_row(path, number, line, text, title) if jsonl else line.rstrip("\n"))
                if len(found) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"search: the corpus {path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"search: the corpus {path} has no passage")
    return found


def _row(path: Path, number: int, line: str, text: str, title: str) -> str:
    """Return the passage in a line of a JSONL file; ConfigError if it has none."""
    try:
        row = json.loads(line)
        head = str(row.get(title, ""))
        return f"{head}: {row[text]}" if head else str(row[text])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"search: {path}:{number}: expected a JSON object with {text!r}"
        ) from None
