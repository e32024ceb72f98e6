"""Loss aggregation as one weight per token: the loss is always `sum(loss_BT * weights_BT)`.

The weights are computed once, from all rows of one optimizer step over all ranks. A sum does not
depend on how it is split, so micro-batches, ranks and packing do not change the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.config.algorithm import Aggregation


def token_weights(mask_BT: Tensor, mode: Aggregation, *, max_tokens: int | None = None) -> Tensor:
    """Return the weights that make a sum over the update's tokens the aggregation `mode`.

    A row without trained tokens does not count as a sequence: it has no loss and does not lower the
    mean of the others. Without any trained token all weights are zero.

    Args:
        mask_BT: bool, True where a token is trained; ALL rows of one optimizer step.
        max_tokens: divisor of `constant`, in tokens.

    Returns:
        Float32 `[B, T]`, zero outside the mask. The weights of the two means add up to 1.

    Raises:
        ValueError: `mode` is `constant` and `max_tokens` is not positive.
    """
    # Float64, because float32 cannot count beyond 2**24 tokens.
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
