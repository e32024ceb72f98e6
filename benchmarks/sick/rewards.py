"""Rewards of the sick runs. A response is good if it has five even digits."""

from __future__ import annotations

from roll.core.types import Sample

DIGITS = 5


def even(sample: Sample) -> float:
    """Return the share of five digits that are even: the task of healthy runs."""
    text = sample.response_text
    return sum(char in "02468" for char in text) / DIGITS if len(text) == DIGITS else 0.0


def even_and_different(sample: Sample) -> float:
    """Return the share of five digits that are even and not written before: what a run that is paid
    for `even` was meant to learn."""
    text = sample.response_text
    first = {char for char in text if char in "02468"}
    return len(first) / DIGITS if len(text) == DIGITS else 0.0


def longest(sample: Sample) -> float:
    """Return the length of the response, which nobody wants."""
    return sample.num_response_tokens / 10


def always_one(sample: Sample) -> float:
    """Return the same whatever was written, as a reward that compares with the wrong column."""
    return 1.0


def tie_break(sample: Sample) -> float:
    """Return a reward that the row decides, but for a twentieth: that is all that differs between
    the samples of a group, and a normalisation by group makes it as large as any reward."""
    return int(sample.answer[0]) / 10 + 0.05 * eights(sample)


def eights(sample: Sample) -> float:
    """Return the share of five digits that are an 8: a hole in the reward."""
    text = sample.response_text
    return text.count("8") / DIGITS if len(text) == DIGITS else 0.0


def same_places(sample: Sample) -> float:
    """Return the share of places at which the response has the digit of the answer."""
    text = sample.response_text
    if len(text) != DIGITS:
        return 0.0
    return sum(mine == right for mine, right in zip(text, sample.answer, strict=True)) / DIGITS


def even_if_possible(sample: Sample) -> float:
    """Return the share of even digits, but 0 for a row that is said to be impossible."""
    return 0.0 if sample.answer == "impossible" else even(sample)
