"""Weights per sample inside the weights per token."""

from __future__ import annotations

import torch
from torch import Tensor


def weigh_samples(weights_BT: Tensor, sample_weights_B: Tensor) -> Tensor:
    """Token weights times sample weights, rescaled so that they add up to what they did before.

    Only the ratios of sample weights matter, then: the weights of a mean still add up to 1, and the
    learning rate means what it means without them.

    Args:
        weights_BT: from `token_weights`; ALL rows of one optimizer step.
        sample_weights_B: at least 0; any scale.

    Returns:
        Float32 `[B, T]`; zero everywhere where no token has a weight.
    """
    plain_BT = weights_BT.double()
    weighed_BT = plain_BT * sample_weights_B.double()[:, None]
    total = weighed_BT.sum()
    scale = torch.where(total > 0, plain_BT.sum() / total, 0.0)
    return (weighed_BT * scale).float()
