"""Geometric discounting along tokens or steps, without a loop over them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16
"""Steps per block; the work per step grows with it, the number of passes shrinks."""


def discounts(mask_BT: Tensor, gamma: float) -> Tensor:
    """gamma ** (trained tokens that follow), float64 `[B, T]`, zero outside the mask.

    Only trained tokens count as steps: what an environment writes between two turns of the policy
    does not make the first turn less responsible for the reward.
    """
    trained_BT = mask_BT.double()
    up_to_BT = trained_BT.cumsum(1)
    following_BT = (up_to_BT[:, -1:] - up_to_BT).clamp(min=0)
    return gamma**following_BT * trained_BT


def discounted_sums(values_BT: Tensor, decay_B: Tensor) -> Tensor:
    """y_t = sum over j >= t of decay ** (j - t) * values_j, that is y_t = values_t + decay y_{t+1}.

    Time is cut into blocks. Within a block the sums are a product with a small triangular matrix
    of powers; the sums at the blocks' first steps then follow the same recursion, with decay to the
    power of a block, so one call of itself per factor `BLOCK` of T finds what flows in from later
    blocks. All powers are at most 1, so no value costs its neighbours precision.

    Args:
        values_BT: finite; computed in float64.
        decay_B: `[B]`, or `[1]` for all rows; within [0, 1], where 0 ** 0 is 1.

    Returns:
        Float64 `[B, T]`.
    """
    rows, steps = values_BT.shape
    decay_D1 = decay_B.to(values_BT.device, torch.float64)[:, None]
    powers_DK = decay_D1 ** torch.arange(BLOCK + 1, device=values_BT.device)
    count = -(-steps // BLOCK)
    missing = count * BLOCK - steps
    values_BT = pad(values_BT.double(), [0, missing]) if missing else values_BT.double()
    blocks_BNK = values_BT.reshape(rows, count, BLOCK)
    # Squeezed where all rows share it: one large product instead of one per row.
    sums_BNK = blocks_BNK @ _triangle(powers_DK).squeeze(0)
    if count > 1:
        heads_BN = discounted_sums(sums_BNK[:, :, 0], powers_DK[:, BLOCK])
        until_next_D1K = powers_DK[:, 1:].flip(1)[:, None]
        sums_BNK[:, :-1].addcmul_(heads_BN[:, 1:, None], until_next_D1K)
    return sums_BNK.view(rows, count * BLOCK)[:, :steps]


def _triangle(powers_DK: Tensor) -> Tensor:
    """`[D, J, T]` of `BLOCK` squared: decay ** (j - t) for j >= t, else 0."""
    positions = torch.arange(BLOCK, device=powers_DK.device)
    lag_JT = (positions[:, None] - positions).clamp(min=0)
    return powers_DK[:, lag_JT].tril()
