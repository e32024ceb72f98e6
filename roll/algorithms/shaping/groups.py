"""Statistics of the siblings of a prompt, told to each of them; float64 `[B]` throughout.

Siblings need not be neighbours; `group_ids_B` are any integers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_mean(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """The mean of each row's group, the row included."""
    values_B = values_B.double()
    group_B, count_G = _groups(group_ids_B)
    sum_G = values_B.new_zeros(len(count_G)).index_add(0, group_B, values_B)
    return (sum_G / count_G)[group_B]


def group_std(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """The unbiased standard deviation (n - 1) of each row's group; 0 for a group of one."""
    values_B = values_B.double()
    group_B, count_G = _groups(group_ids_B)
    squares_B = (values_B - group_mean(values_B, group_ids_B)).square()
    sum_G = values_B.new_zeros(len(count_G)).index_add(0, group_B, squares_B)
    return (sum_G / (count_G - 1).clamp(min=1)).sqrt()[group_B]


def group_range(values_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each row's group."""
    values_B = values_B.double()
    group_B, count_G = _groups(group_ids_B)
    empty_G = values_B.new_zeros(len(count_G))
    low_G = empty_G.scatter_reduce(0, group_B, values_B, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, group_B, values_B, "amax", include_self=False)
    return low_G[group_B], high_G[group_B]


def _groups(group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each row's group, counted from 0, and the size of each group."""
    _, group_B, count_G = torch.unique(group_ids_B, return_inverse=True, return_counts=True)
    return group_B, count_G
