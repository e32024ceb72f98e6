"""Exact match and F1 of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250; evaluation script v2.0)."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return a text in small letters without ASCII punctuation, without the articles a, an and the,
    with one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1 if both are equal when normalised, else 0.

    If nothing of a gold is left ("The The", "!"), the texts themselves are compared, in any case.
    The script accepts an empty answer for such a gold.
    """
    if gold.strip() and not normalise(gold):
        return float(answer.strip().lower() == gold.strip().lower())
    return float(normalise(answer) == normalise(gold))


def f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the answer's words, each counted as often
    as it occurs. If one of both is empty, the exact match."""
    words, wanted = normalise(answer).split(), normalise(gold).split()
    if not words or not wanted:
        return exact_match(answer, gold)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def contains(answer: str, gold: str, max_words: int) -> float:
    """Return 1 if the words of the gold stand in the answer one after another, else 0; 0 also for
    an answer of more than `max_words` words, which could list everything."""
    words, wanted = normalise(answer), normalise(gold)
    if not wanted:
        return exact_match(answer, gold)
    if words.count(" ") + 1 > max_words:
        return 0.0
    return float(f" {wanted} " in f" {words} ")
