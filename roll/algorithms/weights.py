"""Loss aggregation as one weight per token: the loss is `sum(loss_BT * weights_BT)`, always.

Computed once, from all rows of one optimizer step over all ranks. No split over micro-batches,
ranks or packing can then change the result, because a sum does not care how it is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.config.algorithm import Aggregation


def token_weights(mask_BT: Tensor, mode: Aggregation, *, max_tokens: int | None = None) -> Tensor:
    """Weights that turn a plain sum over the update's tokens into the mean that `mode` names.

    A row without trained tokens is no sequence: it has no loss, and it does not lower the mean of
    the others. Without any trained token all weights are zero.

    Args:
        mask_BT: bool, True where a token is trained; ALL rows of one optimizer step.
        mode: the aggregation.
        max_tokens: divisor of `constant`, in tokens.

    Returns:
        Float32 `[B, T]`, zero outside the mask. They add up to 1 for the two means.

    Raises:
        ValueError: `constant` without a positive `max_tokens`.
    """
    # Counts in float64: float32 stops counting at 2**24 tokens.
    trained_BT = mask_BT.to(torch.float64)
    tokens_B1 = trained_BT.sum(1, keepdim=True)
    num_sequences = (tokens_B1 > 0).sum().clamp(min=1)
    match mode:
        case Aggregation.TOKEN_MEAN:
            weights_BT = trained_BT / tokens_B1.sum().clamp(min=1)
        case Aggregation.SEQUENCE_MEAN:
            weights_BT = trained_BT / tokens_B1.clamp(min=1) / num_sequences
        case Aggregation.SEQUENCE_SUM:
            weights_BT = trained_BT / num_sequences
        case Aggregation.CONSTANT:
            if max_tokens is None or max_tokens < 1:
                raise ValueError(
                    f"constant aggregation divides by max_tokens, which is {max_tokens}; pass "
                    "algorithm.aggregation_tokens or sampling.max_new_tokens"
                )
            weights_BT = trained_BT / max_tokens / num_sequences
    return weights_BT.to(torch.float32)
