"""Statistics over siblings, which are the samples of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Siblings:
    """Groups of rows that are samples of one prompt.

    Each statistic is `[B]`: every row gets the value of its own group. G counts the groups.
    """

    group_B: Tensor
    """Group number of each row, int64 `[B]`, from 0 to G - 1."""
    size_G: Tensor
    """Number of rows of each group, float64 `[G]`."""

    @classmethod
    def of(cls, group_ids_B: Tensor) -> Siblings:
        """Build the groups from any integer ids; rows of one group need not be adjacent."""
        _, group_B, size_G = torch.unique(group_ids_B, return_inverse=True, return_counts=True)
        return cls(group_B, size_G.double())

    @property
    def size_B(self) -> Tensor:
        """Number of rows of each row's group, float64 `[B]`."""
        return self.size_G[self.group_B]

    def rows(self) -> Sequence[Tensor]:
        """Return the numbers of the rows of each group, ascending, int64."""
        by_group_B = self.group_B.argsort(stable=True)
        return torch.split(by_group_B, self.size_G.long().tolist())

    def sum(self, values_B: Tensor) -> Tensor:
        """Return the sum over each row's group, float64 `[B]`; of values `[B, ...]`, the sums of
        each column."""
        zeros_G = self.size_G.new_zeros(len(self.size_G), *values_B.shape[1:])
        return zeros_G.index_add(0, self.group_B, values_B.double())[self.group_B]

    def mean(self, values_B: Tensor) -> Tensor:
        """Return the mean over each row's group, the row itself included, float64 `[B]`."""
        return self.sum(values_B) / self.size_B

    def std(self, values_B: Tensor) -> Tensor:
        """Return the unbiased standard deviation (n - 1), float64 `[B]`; 0 for a group of one."""
        squares_B = self.sum((values_B - self.mean(values_B)).square())
        return (squares_B / (self.size_B - 1).clamp(min=1)).sqrt()

    def range(self, values_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each row's group, both float64 `[B]`."""
        values_B, empty_G = values_B.double(), torch.zeros_like(self.size_G)
        low_G = empty_G.scatter_reduce(0, self.group_B, values_B, "amin", include_self=False)
        high_G = empty_G.scatter_reduce(0, self.group_B, values_B, "amax", include_self=False)
        return low_G[self.group_B], high_G[self.group_B]
