"""Best score of a response over the texts that a row gives as right."""

from __future__ import annotations

from collections.abc import Callable

from roll.core.types import Sample
from roll.rewards.answers.qa import right_answers
from roll.rewards.thinking import final_text

MAX_CHARS = 200_000
"""Largest length of a response that is compared, in characters; a longer one scores 0."""


def final_of(sample: Sample) -> str:
    """Return the text after the thoughts; an empty text if a thought does not end or the text has
    more than `MAX_CHARS` characters."""
    final = final_text(sample.response_text, prompt=sample.prompt.text) or ""
    return final if len(final) <= MAX_CHARS else ""


def best_over(sample: Sample, references: str | None, score: Callable[[str, str], float]) -> float:
    """Return the largest score of the final text and a reference; 0 for an empty text.

    Args:
        sample: sample to score.
        references: column with a list of texts; if left out, the answer of the row, a text or the
            JSON text of a list.
        score: function of the final text and one reference.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """
    right = right_answers(sample, references)
    final = final_of(sample)
    return max(score(final, each) for each in right) if final.strip() else 0.0
