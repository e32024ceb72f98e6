"""The `bleu` reward: precision of n-grams against reference texts.

BLEU of one sentence (Papineni et al. 2002) with the numbers of sacreBLEU's `sentence_bleu`: up to
four words, exponential smoothing, effective order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from roll.core.types import Sample
from roll.rewards.answers.qa import right_answers
from roll.rewards.text.references import final_of

ORDER = 4
"""Number of words of the longest n-grams."""

Tokens = Literal["13a", "char"]

_13A = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
"""Steps of the tokenizer 13a: marks apart from words, periods and commas except between digits, and
dashes after digits (mteval-v13a of NIST)."""
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))


def bleu_reward(
    sample: Sample,
    *,
    tokens: Tokens = "13a",
    lowercase: bool = False,
    references: str | None = None,
) -> float:
    """Return BLEU of the text after the thoughts against all references together, in 0..1.

    Args:
        sample: sample to score.
        tokens: `13a`, sacreBLEU's default for languages with spaces; `char` for others: every
            character is a word.
        lowercase: True ignores case.
        references: column with the reference texts; if left out, the answer of the row.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """
    right, final = right_answers(sample, references), final_of(sample)
    if lowercase:
        right, final = [text.lower() for text in right], final.lower()
    return bleu(final, right, tokens)


def bleu(text: str, references: Sequence[str], tokens: Tokens = "13a") -> float:
    """Return BLEU in 0..1 against at least one reference; 0 if the text has no word of any of
    them."""
    words = _words(text, tokens)
    wanted = [_words(reference, tokens) for reference in references]
    log_precisions, smooth = [], 1.0
    for n in range(1, ORDER + 1):
        grams = _grams(words, n)
        allowed: Counter[tuple[str, ...]] = Counter()
        for reference in wanted:
            allowed |= _grams(reference, n)
        total, correct = sum(grams.values()), sum((grams & allowed).values())
        if n == 1 and not correct:
            return 0.0
        if not total:
            break
        if not correct:
            smooth *= 2
        log_precisions.append(math.log((correct or 1 / smooth) / total))
    closest = min((abs(len(each) - len(words)), len(each)) for each in wanted)[1]
    brevity = min(0.0, 1 - closest / len(words))
    return math.exp(brevity + sum(log_precisions) / len(log_precisions))


def _words(text: str, tokens: Tokens) -> list[str]:
    """Split a text into words as sacreBLEU does: by its tokenizer `13a`, or into single characters
    (`char`)."""
    text = text.rstrip()
    if tokens == "char":
        return [char for char in text if not char.isspace()]
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, mark in _ENTITIES:
        text = text.replace(entity, mark)
    text = f" {text} "
    for pattern, replacement in _13A:
        text = pattern.sub(replacement, text)
    return text.split()


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    """Return how often each run of n words occurs."""
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))
