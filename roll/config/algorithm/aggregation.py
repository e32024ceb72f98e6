"""How the losses of tokens become one number."""

from __future__ import annotations

from enum import StrEnum


class Aggregation(StrEnum):
    """How the losses of tokens become one number."""

    TOKEN_MEAN = "token_mean"
    """Every token counts the same (DAPO, arXiv 2503.14476)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over sequences of the mean over tokens: every sequence counts the same (GRPO)."""
    SEQUENCE_SUM = "sequence_sum"
    """Mean over sequences of the sum over tokens."""
    CONSTANT = "constant"
    """Mean over sequences of the sum of tokens over a constant (Dr.GRPO, arXiv 2503.20783)."""
