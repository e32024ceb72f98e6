"""Combination of sample weights with token weights."""

from __future__ import annotations

import torch
from torch import Tensor


def weigh_samples(weights_BT: Tensor, sample_weights_B: Tensor) -> Tensor:
    """Return token weights times sample weights, rescaled to the sum of the token weights.

    Only the ratios of sample weights matter: the weights of a mean still add up to 1, and the
    learning rate has the same effect as without sample weights.

    Args:
        weights_BT: result of `token_weights` for ALL rows of one optimizer step.
        sample_weights_B: numbers of at least 0, on any scale.

    Returns:
        Float32 `[B, T]`; all zero if all products are zero.
    """
    plain_BT = weights_BT.double()
    weighed_BT = plain_BT * sample_weights_B.double()[:, None]
    total = weighed_BT.sum()
    scale = torch.where(total > 0, plain_BT.sum() / total, 0.0)
    return (weighed_BT * scale).float()
