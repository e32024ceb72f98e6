"""Mean and spread of many numbers, and numbers on the scale of their own spread.

Of a step's tokens, of its samples, or of a stream that is never stored.
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
"""A standard deviation below this share of the mean is the rounding of equal float32 numbers."""
PART = 2**18
"""Numbers that are taken to float64 at a time, so that they stay in the cache: fetching the memory
for a whole step's from the system costs more than the arithmetic."""
CANCELLED = 1e-4
"""Squared distances from the mean that are less than this share of the squares are summed by
themselves: the difference of two sums would keep fewer than eleven of sixteen digits."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of all numbers seen; float64, so that a billion of them lose nothing."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Unbiased (n - 1); 0 for fewer than two numbers."""
        return math.sqrt(self.squares / max(self.count - 1, 1))

    @property
    def spread(self) -> bool:
        """Whether any two numbers differ by more than rounding."""
        return self.std > NO_SPREAD * abs(self.mean)

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        """Of a tensor of any shape, or of those of its numbers where `mask` is True."""
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
        """The moments of both streams together (Chan, Golub and LeVeque 1979). No large sum is
        subtracted from another."""
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
        """Plain JSON; floats survive it bit for bit."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """From `state`.

        Raises:
            CheckpointError: it is the state of something else.
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
    """(value - mean) / (std + eps), std unbiased (n - 1); computed in float64.

    Where there is no spread (equal numbers, a single one) nothing is divided, so that centred
    numbers become 0.

    Args:
        values: any shape and float dtype.
        mask: bool; which numbers take part. All by default.
        eps: added to the standard deviation.
        center: False subtracts nothing, before or after.
        moments: of these very numbers, where they are known already.

    Returns:
        Shape and dtype of `values`, zero outside the mask.
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
    """`PART` numbers at a time, and which of them take part; None where all do."""
    flat, chosen = values.flatten(), None if mask is None else mask.flatten()
    for start in range(0, len(flat), PART):
        part = slice(start, start + PART)
        yield flat[part], None if chosen is None else chosen[part]


def _only(values: Tensor, chosen: Tensor | None) -> Tensor:
    return values if chosen is None else only(values, chosen)
