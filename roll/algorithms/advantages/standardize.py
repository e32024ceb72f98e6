"""Zero mean and unit spread over the numbers that take part, and over no others."""

from __future__ import annotations

from torch import Tensor


def standardized(values: Tensor, *, eps: float) -> Tensor:
    """(value - mean) / (std + eps), float64, any shape; std is unbiased (n - 1).

    One value, or equal values, become 0.
    """
    values = values.double()
    centred = values - values.mean()
    std = (centred.square().sum() / max(values.numel() - 1, 1)).sqrt()
    return centred / (std + eps)


def standardized_tokens(values_BT: Tensor, mask_BT: Tensor, *, eps: float) -> Tensor:
    """`standardized` over the tokens of the mask; float64 `[B, T]`, zero outside of it."""
    zeros_BT = values_BT.new_zeros(values_BT.shape).double()
    return zeros_BT.masked_scatter_(mask_BT, standardized(values_BT[mask_BT], eps=eps))
