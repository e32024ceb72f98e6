"""`StepRewards`: rewards of single steps or tokens of a response (process rewards)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Self

from roll.core.completion import TOKEN_TYPE
from roll.core.pickling import pickle_by_fields

VALUE_TYPE = "f"
"""Type code of arrays of rewards: float32."""
MAX_REWARD = 1e15
"""Largest absolute value of a reward. Training computes squares of rewards in float32, which has
numbers up to 3.4e38: a larger reward would make NaN of the advantages of its whole group."""
MAX_NUMBER = 1e300
"""Largest absolute value of a number beside a reward: sums of larger ones may be infinite."""


def require_reward(value: float, what: str, most: float = MAX_REWARD) -> float:
    """Return a number; ValueError, which begins with `what`, if it is not finite or larger than
    `most`."""
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, found {value}")
    if abs(value) > most:
        raise ValueError(
            f"{what} must lie between {-most:g} and {most:g}, found {value:g}; scale it: a step "
            "cannot compute with larger numbers"
        )
    return value


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class StepRewards:
    """Rewards of the steps of one response, each at the token with which its step ends.

    Example: StepRewards.of([(3, 0.5), (7, 1.0)]) gives 0.5 to the third token of the response and 1
    to the seventh.
    """

    ends: array[int]
    """Number of tokens of the response up to the end of each step, int32, ascending. Of a sample
    with branches, the tokens of its rows count as if one row followed the other."""
    values: array[float]
    """Reward of each step, float32."""

    @classmethod
    def of(cls, steps: Iterable[tuple[int, float]]) -> Self:
        """Make rewards of pairs of an end, in tokens, and a value; values of equal ends are
        added."""
        at: dict[int, list[float]] = {}
        for end, value in steps:
            at.setdefault(end, []).append(value)
        ends = sorted(at)
        return cls(array(TOKEN_TYPE, ends), array(VALUE_TYPE, [fsum(at[end]) for end in ends]))

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return fsum(self.values)

    @property
    def pairs(self) -> tuple[tuple[int, float], ...]:
        """Pairs of end and value."""
        return tuple(zip(self.ends, self.values, strict=True))

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.ends)


def weighted_sum(parts: Sequence[tuple[float, StepRewards | None]]) -> StepRewards | None:
    """Return the sum of the rewards, each times its weight; None if there are no rewards."""
    given = [(weight, steps) for weight, steps in parts if steps is not None]
    if not given:
        return None
    return StepRewards.of(
        (end, weight * value) for weight, steps in given for end, value in steps.pairs
    )
