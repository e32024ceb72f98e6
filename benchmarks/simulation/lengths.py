"""How long responses are: distributions drawn by number, so that a retry has the length it had."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(key: int) -> float:
    """A number in (0, 1) that depends on nothing but `key` (SplitMix64, Steele et al. 2014)."""
    state = (key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) + 0.5) / (1 << 64)


class Lengths(Protocol):
    """A distribution of response lengths, in tokens."""

    def draw(self, key: int) -> float:
        """The length of one response, before rounding; equal keys give equal lengths."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal): what reasoning models write is close to it, with sigma about 1."""

    median: float
    sigma: float = 1.0

    def draw(self, key: int) -> float:
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(uniform(key)))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Heavy tail: P(length > x) falls as x ** -alpha; below 2 the variance is infinite."""

    median: float
    alpha: float = 1.5

    def draw(self, key: int) -> float:
        return self.median / math.pow(2 * uniform(key), 1 / self.alpha)


@dataclass(frozen=True, slots=True)
class Fixed:
    """All alike."""

    median: float

    def draw(self, key: int) -> float:
        return self.median
