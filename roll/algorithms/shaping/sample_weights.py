"""Combination of sample weights with token weights."""

from __future__ import annotations

import torch
from torch import Tensor


def weigh_samples(
    weights_BT: Tensor, sample_weights_B: Tensor, *, tokens_B: Tensor | None = None
) -> Tensor:
    """Return token weights times sample weights, rescaled to the sum of the token weights.

    Only the ratios of sample weights matter: the weights of a mean still add up to 1, and the
    learning rate has the same effect as without sample weights.

    Args:
        weights_BT: result of `token_weights` for ALL rows of one optimizer step.
        sample_weights_B: numbers of at least 0, on any scale.
        tokens_B: if T is 1, number of tokens for which the weight of each row stands.

    Returns:
        Float32 `[B, T]`; all zero if all products are zero.
    """
    plain_BT = weights_BT.double()
    weighed_BT = plain_BT * sample_weights_B.double()[:, None]
    times_B1 = 1.0 if tokens_B is None else tokens_B.double()[:, None]
    total = (weighed_BT * times_B1).sum()
    scale = torch.where(total > 0, (plain_BT * times_B1).sum() / total, 0.0)
    return (weighed_BT * scale).float()
