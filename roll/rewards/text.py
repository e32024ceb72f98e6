"""Rewards that compare text."""

from __future__ import annotations

from roll.core.types import Sample


def exact_reward(sample: Sample) -> float:
    """1 where the response equals the answer, white space at both ends aside; else 0."""
    return float(sample.response_text.strip() == sample.answer.strip())
