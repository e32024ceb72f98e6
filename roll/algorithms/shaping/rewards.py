"""Rewards of a step, on their way through reward shaping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rewards:
    """Total rewards of a step, which each part of reward shaping takes and returns."""

    total_B: Tensor
    """Total reward of each sample, float64 `[B]`."""
    baseline_B: Tensor | None = None
    """Rewards of greedy responses to the same prompts, float64 `[B]`. They are compared with the
    totals, so every change that does not depend on the response itself applies to both."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Rewards:
        """Apply `change` to the totals and, if set, to the baseline."""
        baseline_B = None if self.baseline_B is None else change(self.baseline_B)
        return Rewards(change(self.total_B), baseline_B)
