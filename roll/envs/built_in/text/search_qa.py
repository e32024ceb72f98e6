"""`search_qa`: answer a question whose facts stand in several passages of a corpus."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from roll.envs.built_in.commands import last_command
from roll.envs.built_in.text.bm25 import Bm25, words_of
from roll.envs.built_in.text.made_corpus import Corpus, make_corpus

MAX_STATE = 2000
"""Number of characters of a state's name."""


class SearchQa:
    """Question with a search over a corpus. A turn ends with a line `search: WORDS`, which is told
    the best passages by BM25, or `answer: NAME`, which ends the episode.

    The reward is 1 for the right answer, 0 otherwise; case, articles and punctuation do not matter.
    The corpus is made by a script, about people, companies and towns that do not exist, so only a
    search finds its facts. Questions follow from the seed.

    Args:
        hops: number of facts that a question needs.
        size: number of passages, about.
        shown: number of passages that a search shows.
        corpus_seed: seed of the corpus; all tasks share it.
        rules: explain the commands in the first observation.
    """

    def __init__(
        self,
        hops: int = 2,
        size: int = 200,
        shown: int = 3,
        corpus_seed: int = 0,
        rules: bool = True,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if not 1 <= hops <= 6 or not 10 <= size <= 100_000 or shown < 1:
            raise ValueError(
                f"hops = {hops} must be from 1 to 6, size = {size} from 10 to 100000, shown = "
                f"{shown} at least 1"
            )
        self.hops = hops
        self.size = size
        self.shown = shown
        self.corpus_seed = corpus_seed
        self.rules = rules
        self._invalid = 0
        self._searches = 0
        self._won = False
        self._seen: set[str] = set()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._corpus, self._index = _indexed(self.corpus_seed, self.size)
        question, self._answer = self._corpus.question(random.Random(seed), self.hops)
        rules = (
            "Answer the question. A line `search: words` shows passages with these words; a line "
            "`answer: name` gives your answer. End each turn with one of them.\n"
        )
        return (rules if self.rules else "") + question, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        command = last_command(action, ("search", "answer"))
        if command is None:
            self._invalid += 1
            said = "Write `search: ...` or `answer: ...`."
            return said, 0.0, False, False, self._info()
        name, argument = command
        if name == "answer":
            self._won = _plain(argument) == _plain(self._answer)
            said = "Right." if self._won else "Wrong."
            return said, float(self._won), True, False, self._info()
        self._searches += 1
        found = [self._corpus.passages[i] for i in self._index.search(argument, self.shown)]
        self._seen |= {title for title, _ in found}
        said = "\n".join(f"[{title}] {text}" for title, text in found) or "Nothing was found."
        return said, 0.0, False, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the sorted titles of the passages
        seen so far, cut to MAX_STATE characters."""
        return {
            "success": self._won,
            "searches": self._searches,
            "invalid": self._invalid,
            "state": "; ".join(sorted(self._seen))[:MAX_STATE],
        }


def _plain(answer: str) -> list[str]:
    """Return the words of an answer that count, as in SQuAD."""
    return [word for word in words_of(answer) if word not in ("a", "an", "the")]


@cache
def _indexed(seed: int, size: int) -> tuple[Corpus, Bm25]:
    """Return a corpus and its index; one for all episodes of a process."""
    corpus = make_corpus(seed, size)
    return corpus, Bm25([f"{title} {text}" for title, text in corpus.passages])
