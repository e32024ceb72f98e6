"""The `exact` reward."""

from __future__ import annotations

from roll.core.types import Sample


def exact_reward(sample: Sample) -> float:
    """Return 1 if response and answer are equal apart from white space at their ends, else 0."""
    return float(sample.response_text.strip() == sample.answer.strip())
