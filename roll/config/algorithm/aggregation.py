"""Ways to reduce the losses of all tokens of an update to one number."""

from __future__ import annotations

from enum import StrEnum


class Aggregation(StrEnum):
    """Ways to reduce the losses of all tokens of an update to one number."""

    TOKEN_MEAN = "token_mean"
    """Mean over all tokens: every token counts the same (DAPO, arXiv 2503.14476)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over sequences of the mean over their tokens: every sequence counts the same (GRPO)."""
    SEQUENCE_SUM = "sequence_sum"
    """Mean over sequences of the sum over their tokens."""
    CONSTANT = "constant"
    """Mean over sequences of the sum over their tokens divided by a constant (Dr.GRPO, arXiv
    2503.20783)."""
