"""The tool `search`: passages of a corpus that fit a query best, by words (BM25) or by meaning."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.api import Hearing, Search
from roll.envs.tools.api import Tool, ToolError
from roll.envs.tools.functions import tool_of
from roll.envs.tools.packages import agent_package
from roll.envs.tools.passages import read_passages

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


@dataclass(eq=False)
class SearchKit:
    """Tools of a corpus: of a file whose index is built once in a process, by the first episode; or
    of one of the `corpora` of the run."""

    corpus: str | None = None
    """File with one passage per line: JSON objects (`.jsonl`), or plain text. Set either this or
    `dense`."""
    dense: str | None = None
    """Name of one of the `corpora`."""
    text: str = "text"
    """Column of the passage; of a file."""
    title: str = "title"
    """Column of its title, if there is one; it is searched and shown. Of a file."""
    results: int = 3
    """Passages of one search."""
    name: str = "search"
    _ask: Search | None = field(default=None, init=False, repr=False)
    """Function that searches the corpora of the run."""

    def __post_init__(self) -> None:
        """Raise ConfigError unless either `corpus` or `dense` is set, each with its own
        settings."""
        if (self.corpus is None) == (self.dense is None):
            raise ConfigError(
                "search: set exactly one of `corpus` (a file, searched by words) and `dense` (one "
                "of the `corpora` of the run, searched by meaning)"
            )
        if self.dense is not None and (self.text, self.title) != ("text", "title"):
            raise ConfigError("search: `text` and `title` of `dense` are those of its corpus")

    def listen(self, hearing: Hearing) -> None:
        """Keep the way to the corpora of the run."""
        self._ask = hearing.search

    async def open(self, options: Mapping[str, Any]) -> Sequence[Tool]:
        """Build the index of a file if this process has none yet; return the tool."""
        if self.corpus is None:
            assert self.dense is not None
            return [self._dense_tool(self.dense)]
        index = await asyncio.to_thread(self._index, self.corpus)

        def search(query: str) -> str:
            """Searches a collection of texts; returns the passages that fit best.

            Args:
                query: words to look for.
            """
            found = index.best(query, self.results)
            if not found:
                raise ToolError("no passage has a word of the query")
            return _shown(found)

        return [tool_of(search, name=self.name)]

    def _dense_tool(self, corpus: str) -> Tool:
        """Return the tool that searches one of the `corpora` of the run."""

        async def search(query: str) -> str:
            """Searches a collection of texts; returns the passages that fit best.

            Args:
                query: what to look for, in words.
            """
            if self._ask is None:
                raise EnvironmentFailedError(
                    f"search: the corpus {corpus!r} belongs to a run, and there is none here; an "
                    "environment with a process of its own (`process`) does not reach it, either"
                )
            return _shown(await self._ask(corpus, query, self.results))

        return replace(tool_of(search, name=self.name), unlimited=True)

    async def close(self) -> None:
        """Do nothing: the index serves the next episodes."""

    def _index(self, corpus: str) -> Index:
        """Return the index of a file; build it at the first call in this process."""
        key = (str(Path(corpus).resolve()), f"{self.title}/{self.text}")
        with _building:
            if key not in _indexes:
                _indexes[key] = build_index(read_passages(Path(corpus), self.text, self.title))
            return _indexes[key]


def _shown(passages: Sequence[str]) -> str:
    """Return passages as the policy reads them, with numbers from 1 on."""
    return "\n\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))


def build_index(passages: Sequence[str]) -> Index:
    """Return the index of passages, of which there must be one; ConfigError if the package bm25s is
    missing."""
    package = agent_package("bm25s", "bm25s", "search")
    retriever = package.BM25()
    retriever.index(package.tokenize(list(passages), show_progress=False), show_progress=False)
    return Index(tuple(passages), retriever, package)
