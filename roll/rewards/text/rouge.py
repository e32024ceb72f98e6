"""The `rouge` reward: overlap with a reference text.

ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) with the numbers of the package rouge-score without
stemming.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from roll.core.types import Sample
from roll.rewards.packages import optional_package
from roll.rewards.text.references import best_over

_WORD = re.compile(r"[a-z0-9]+")

Measure = Literal["rouge1", "rouge2", "rougeL"]
Value = Literal["f1", "precision", "recall"]


def rouge_reward(
    sample: Sample,
    *,
    measure: Measure = "rougeL",
    value: Value = "f1",
    references: str | None = None,
) -> float:
    """Return the ROUGE of the text after the thoughts, in 0..1, the best over all references.

    Words are runs of ASCII letters and digits, in any case, so that texts of other scripts have
    none and score 0. `recall` alone rewards long texts that contain everything.

    Args:
        sample: sample to score.
        measure: `rouge1` and `rouge2` count words and pairs of words that both have; `rougeL` takes
            the longest common subsequence of words.
        value: part of the measure that is the score.
        references: column with the reference texts; if left out, the answer of the row.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """
    return best_over(sample, references, lambda text, right: rouge(text, right, measure, value))


def rouge(text: str, reference: str, measure: Measure, value: Value) -> float:
    """Return one number of ROUGE; 0 if one of both has no words."""
    words, wanted = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    if measure == "rougeL":
        lcs = optional_package("rapidfuzz.distance", "rapidfuzz", "ROUGE-L is computed").LCSseq
        common, many, many_wanted = int(lcs.similarity(words, wanted)), len(words), len(wanted)
    else:
        n = 1 if measure == "rouge1" else 2
        grams, wanted_grams = _grams(words, n), _grams(wanted, n)
        common = sum((grams & wanted_grams).values())
        many, many_wanted = sum(grams.values()), sum(wanted_grams.values())
    if not common:
        return 0.0
    if value == "f1":
        return 2.0 * common / (many + many_wanted)
    return float(common / (many if value == "precision" else many_wanted))


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    """Return how often each run of n words occurs."""
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def check_rouge(measure: Measure = "rougeL", **_: object) -> None:
    """Raise ConfigError if ROUGE-L is asked for without the package rapidfuzz."""
    if measure == "rougeL":
        rouge("a", "a", measure, "f1")
