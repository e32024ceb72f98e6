"""Loss aggregation as one weight per token: the loss is always `sum(loss_BT * weights_BT)`.

The weights are computed once, from all rows of one optimizer step over all ranks. A sum does not
depend on how it is split, so micro-batches, ranks and packing do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    weights_B = row_weights(mask_BT.sum(1), mode, max_tokens=max_tokens)
    return (weights_B[:, None] * mask_BT).to(torch.float32)


def row_weights(
    tokens_B: Tensor,
    mode: Aggregation,
    *,
    max_tokens: int | None = None,
    samples: Sequence[object] | None = None,
) -> Tensor:
    """Return the weight that every trained token of a row has, float64 `[B]`; see `token_weights`.
    Rows without trained tokens have a weight, too, which has no effect.

    Args:
        tokens_B: number of trained tokens of each row; ALL rows of one optimizer step.
        max_tokens: divisor of `constant`, in tokens.
        samples: sample of each row, any hashable; None: each row is one. The rows of a sample count
            as one sequence in `sequence_sum` and `constant`, which add its tokens up wherever they
            are; `sequence_mean`, the mean of means of rows, counts each.

    Raises:
        ValueError: `mode` is `constant` and `max_tokens` is not positive.
    """
    # Float64, because float32 cannot count beyond 2**24 tokens.
    tokens_B = tokens_B.to(torch.float64)
    one_B = torch.ones_like(tokens_B)
    match mode:
        case Aggregation.TOKEN_MEAN:
            return one_B / tokens_B.sum().clamp(min=1)
        case Aggregation.SEQUENCE_MEAN:
            return one_B / tokens_B.clamp(min=1) / _num_samples(tokens_B, None)
        case Aggregation.SEQUENCE_SUM:
            return one_B / _num_samples(tokens_B, samples)
        case Aggregation.CONSTANT:
            if max_tokens is None or max_tokens < 1:
                raise ValueError(
                    f"constant aggregation divides by max_tokens, which is {max_tokens}; pass "
                    "algorithm.aggregation_tokens or sampling.max_new_tokens"
                )
            return one_B / max_tokens / _num_samples(tokens_B, samples)


def _num_samples(tokens_B: Tensor, samples: Sequence[object] | None) -> int:
    """Return the number of samples with trained tokens, but at least 1; for the arguments see
    `row_weights`."""
    trained = (tokens_B > 0).tolist()
    names = range(len(trained)) if samples is None else samples
    return max(1, len({name for name, has in zip(names, trained, strict=True) if has}))
