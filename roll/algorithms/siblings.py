"""Statistics over the samples of one prompt: the one place where rows are added up by group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Siblings:
    """Which rows belong together. Each statistic is `[B]`: every row gets its own group's."""

    group_B: Tensor
    """Int64, 0 to G - 1."""
    size_G: Tensor
    """Float64; rows of each group."""

    @classmethod
    def of(cls, group_ids_B: Tensor) -> Siblings:
        """From any integers; siblings need not be neighbours."""
        _, group_B, size_G = torch.unique(group_ids_B, return_inverse=True, return_counts=True)
        return cls(group_B, size_G.double())

    @property
    def size_B(self) -> Tensor:
        """Float64; rows of each row's group."""
        return self.size_G[self.group_B]

    def sum(self, values_B: Tensor) -> Tensor:
        """Float64."""
        zeros_G = torch.zeros_like(self.size_G)
        return zeros_G.index_add(0, self.group_B, values_B.double())[self.group_B]

    def mean(self, values_B: Tensor) -> Tensor:
        """Float64; the row itself included."""
        return self.sum(values_B) / self.size_B

    def std(self, values_B: Tensor) -> Tensor:
        """Float64, unbiased (n - 1); 0 for a group of one."""
        squares_B = self.sum((values_B - self.mean(values_B)).square())
        return (squares_B / (self.size_B - 1).clamp(min=1)).sqrt()

    def range(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """Float64; the smallest and the largest value."""
        values_B, empty_G = values_B.double(), torch.zeros_like(self.size_G)
        low_G = empty_G.scatter_reduce(0, self.group_B, values_B, "amin", include_self=False)
        high_G = empty_G.scatter_reduce(0, self.group_B, values_B, "amax", include_self=False)
        return low_G[self.group_B], high_G[self.group_B]
