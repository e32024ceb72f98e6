"""The tool `search`: passages of a corpus that fit a query best, by BM25."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.core.errors import ConfigError
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.functions import tool_of
from roll.envs.tools.packages import agent_package

_indexes: dict[tuple[str, str], Index] = {}
_building = threading.Lock()


@dataclass(frozen=True)
class Index:
    """Passages with their BM25 index."""

    passages: tuple[str, ...]
    retriever: Any
    package: Any

    def best(self, query: str, count: int) -> list[str]:
        """Return at most `count` passages that share a word with the query, best first."""
        words = self.package.tokenize([query], show_progress=False, return_ids=False)
        known = self.retriever.vocab_dict
        if not any(word in known for word in words[0]):
            return []
        places, scores = self.retriever.retrieve(
            words, k=min(count, len(self.passages)), show_progress=False, n_threads=0
        )
        return [
            self.passages[int(place)]
            for place, score in zip(places[0], scores[0], strict=True)
            if score > 0
        ]


@dataclass(frozen=True)
class SearchKit:
    """Tools of a corpus. The index is built once in a process, by the first episode."""

    corpus: str
    """File with one passage per line: JSON objects (`.jsonl`), or plain text."""
    text: str = "text"
    """Column of the passage."""
    title: str = "title"
    """Column of its title, if there is one; it is searched and shown."""
    results: int = 3
    """Passages of one search."""
    name: str = "search"

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Build the index if this process has none yet; return the tool."""
        index = await asyncio.to_thread(self._index)

        def search(query: str) -> str:
            """Searches a collection of texts; returns the passages that fit best.

            Args:
                query: words to look for.
            """
            found = index.best(query, self.results)
            if not found:
                raise ToolError("no passage has a word of the query")
            return "\n\n".join(f"[{i}] {passage}" for i, passage in enumerate(found, 1))

        return [tool_of(search, name=self.name)]

    async def close(self) -> None:
        """Do nothing: the index serves the next episodes."""

    def _index(self) -> Index:
        """Return the index of the corpus; build it at the first call in this process."""
        key = (str(Path(self.corpus).resolve()), f"{self.title}/{self.text}")
        with _building:
            if key not in _indexes:
                _indexes[key] = build_index(_passages(Path(self.corpus), self.text, self.title))
            return _indexes[key]


def build_index(passages: Sequence[str]) -> Index:
    """Return the index of passages.

    Raises:
        ConfigError: the package bm25s is missing, or there is no passage.
    """
    package = agent_package("bm25s", "bm25s", "search")
    if not passages:
        raise ConfigError("search: the corpus has no passage")
    retriever = package.BM25()
    retriever.index(package.tokenize(list(passages), show_progress=False), show_progress=False)
    return Index(tuple(passages), retriever, package)


def _passages(path: Path, text: str, title: str) -> list[str]:
    """Return the passages of a corpus: lines of text, or the columns `title` and `text` of a JSONL
    file. ConfigError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"search: the corpus {path} cannot be read: {error}") from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            head = str(row.get(title, ""))
            found.append(f"{head}: {row[text]}" if head else str(row[text]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"search: {path}:{number}: expected a JSON object with {text!r}"
            ) from None
    return found
