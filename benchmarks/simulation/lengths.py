"""Distributions of response lengths, drawn by a key, so that a retry gets the same length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(key: int) -> float:
    """Return a pseudo-random number in (0, 1) that depends only on `key` (SplitMix64, Steele et al.
    2014)."""
    state = (key * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) + 0.5) / (1 << 64)


class Lengths(Protocol):
    """Distribution of response lengths, in tokens."""

    def draw(self, key: int) -> float:
        """Return the length of one response, before rounding; equal keys give equal lengths."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution, exp(normal). The response lengths of reasoning models are close to
    it, with sigma about 1."""

    median: float
    sigma: float = 1.0

    def draw(self, key: int) -> float:
        return self.median * math.exp(self.sigma * _NORMAL.inv_cdf(uniform(key)))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Pareto distribution, with a heavy tail: P(length > x) falls as x ** -alpha. For alpha of at
    most 2 the variance is infinite."""

    median: float
    alpha: float = 1.5

    def draw(self, key: int) -> float:
        return self.median / math.pow(2 * uniform(key), 1 / self.alpha)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Distribution in which all responses have the same length."""

    median: float

    def draw(self, key: int) -> float:
        return self.median
