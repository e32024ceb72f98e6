"""Search by words: BM25 (Robertson and Zaragoza, 2009), for corpora that fit in a worker."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.5, 0.75
"""Saturation of a word's count, and weight of a text's length; the usual values."""
MAX_WORDS = 100
"""Number of words of a query that count."""


class Bm25:
    """Index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        self._lengths = [count.total() for count in counts]
        self._mean = sum(self._lengths) / max(len(counts), 1) or 1.0
        self._texts_with: dict[str, list[tuple[int, int]]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                self._texts_with.setdefault(word, []).append((i, times))

    def search(self, query: str, most: int) -> list[int]:
        """Return the numbers of the best texts, the best first; texts without a word of the query
        are left out. Equal ones are in the order of the texts."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words_of(query)[:MAX_WORDS]):
            found = self._texts_with.get(word, [])
            rarity = math.log(1 + (len(self._lengths) - len(found) + 0.5) / (len(found) + 0.5))
            for i, times in found:
                length = 1 - B + B * self._lengths[i] / self._mean
                gained = rarity * times * (K1 + 1) / (times + K1 * length)
                scores[i] = scores.get(i, 0.0) + gained
        return sorted(scores, key=lambda i: (-scores[i], i))[:most]


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"[^\W_]+", text.casefold())
