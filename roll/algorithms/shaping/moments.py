"""Mean and variance of a stream of numbers that is never stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor

from roll.core.errors import CheckpointError


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

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """The moments of a tensor of any shape."""
        count = values.numel()
        if count == 0:
            return cls()
        values = values.double()
        mean = values.mean()
        return cls(count, mean.item(), (values - mean).square().sum().item())

    def merge(self, other: Self) -> Self:
        """The moments of both streams together (Chan, Golub and LeVeque 1979); never subtracts two
        large sums, as the difference of the mean square and the squared mean does."""
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
