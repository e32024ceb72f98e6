"""Mean and standard deviation of many numbers, and standardization with them.

The numbers are a step's tokens, its samples, or a stream that is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from roll.algorithms.masking import only
from roll.core.errors import CheckpointError

NO_SPREAD = 1e-10
"""Share of the mean below which a standard deviation is only rounding of equal float32 numbers."""
PART = 2**18
"""Number of elements that are converted to float64 at a time, so that they stay in the cache.
Allocating the memory for all elements of a step takes longer than the arithmetic."""
CANCELLED = 1e-4
"""Share of the sum of squares below which the sum of squared distances from the mean is computed
directly. The difference of two sums would keep fewer than eleven of sixteen digits there."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of all numbers seen, in float64, so that a billion numbers lose no precision."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Unbiased standard deviation (n - 1); 0 for fewer than two numbers."""
        return math.sqrt(self.squares / max(self.count - 1, 1))

    @property
    def spread(self) -> bool:
        """True if the numbers differ by more than rounding."""
        return self.std > NO_SPREAD * abs(self.mean)

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        """Compute the moments of a tensor of any shape, or of its numbers where `mask` is True."""
        found = cls()
        for part, chosen in _parts(values, mask):
            count = part.numel() if chosen is None else int(chosen.sum())
            if count:
                part = _only(part, chosen).double()
                mean, total = part.sum().item() / count, torch.dot(part, part).item()
                squares = total - count * mean * mean
                if not squares > CANCELLED * total:
                    gaps = _only(part - mean, chosen)
                    squares = torch.dot(gaps, gaps).item()
                found = found.merge(cls(count, mean, squares))
        return found

    def merge(self, other: Self) -> Self:
        """Return the moments of both streams together (Chan, Golub and LeVeque 1979).

        The formula subtracts no large sum from another, so it loses no precision.
        """
        count = self.count + other.count
        if count == 0:
            return self
        gap = other.mean - self.mean
        share = other.count / count
        return type(self)(
            count,
            self.mean + gap * share,
            self.squares + other.squares + gap * gap * self.count * share,
        )

    def state(self) -> dict[str, float]:
        """Return the moments as plain JSON, which preserves floats bit for bit."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Build the moments from the result of `state`.

        Raises:
            CheckpointError: the keys are not those of moments.
        """
        if state.keys() != {"count", "mean", "squares"}:
            raise CheckpointError(f"not the state of running moments: keys {sorted(state)}")
        return cls(int(state["count"]), float(state["mean"]), float(state["squares"]))


def standardized(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    eps: float,
    center: bool = True,
    moments: Moments | None = None,
) -> Tensor:
    """Return (value - mean) / (std + eps) with the unbiased std (n - 1), computed in float64.

    Without spread (equal numbers, or a single number) the numbers are not divided, so centred
    numbers become 0.

    Args:
        values: numbers of any shape and float dtype.
        mask: bool, True at the numbers to standardize; all numbers by default.
        eps: number that is added to the standard deviation.
        center: if False, the mean is not subtracted.
        moments: moments of exactly these numbers, if they are known already.

    Returns:
        Tensor in the shape and dtype of `values`, zero outside the mask.
    """
    moments = Moments.of(values, mask) if moments is None else moments
    shift = moments.mean if center else 0.0
    divisor = moments.std + eps if moments.spread else 1.0
    found = torch.empty_like(values, memory_format=torch.contiguous_format)
    parts = zip(_parts(found, None), _parts(values, mask), strict=True)
    for (target, _), (part, chosen) in parts:
        scaled = part.double().sub_(shift).div_(divisor)
        target.copy_(_only(scaled.to(target.dtype), chosen))
    return found


def _parts(values: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield `PART` numbers at a time with their part of the mask, or with None if all count."""
    flat, chosen = values.flatten(), None if mask is None else mask.flatten()
    for start in range(0, len(flat), PART):
        part = slice(start, start + PART)
        yield flat[part], None if chosen is None else chosen[part]


def _only(values: Tensor, chosen: Tensor | None) -> Tensor:
    """Return `values` with zeros where `chosen` is False; None: all numbers are chosen."""
    return values if chosen is None else only(values, chosen)
