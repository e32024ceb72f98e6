"""Geometric discounting over tokens or steps, without a loop over single tokens or steps."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
"""Number of steps in a block; a power of 2. The sums take six passes over all numbers and one pass
from block to block. Without blocks, 1024 steps would need 10 passes over all numbers, which take a
fifth to a quarter longer."""


def discounts(mask_BT: Tensor, gamma: float) -> Tensor:
    """Return gamma ** (number of trained tokens that follow), float64 `[B, T]`, 0 outside the mask.

    Only trained tokens count as steps. Text that an environment writes between two turns of the
    policy does not make the first turn less responsible for the reward.
    """
    trained_BT = mask_BT.double()
    up_to_BT = trained_BT.cumsum(1)
    following_BT = (up_to_BT[:, -1:] - up_to_BT).clamp(min=0)
    return gamma**following_BT * trained_BT


def discounted_sums(values_BT: Tensor, decay_B: Tensor) -> Tensor:
    """Return discounted sums y_t = sum over j >= t of decay ** (j - t) * values_j.

    This is the recurrence y_t = values_t + decay * y_{t+1}. The sum over 2n steps from t is the sum
    over n steps from t plus decay ** n times the sum over n steps from t + n. Doubling in this way
    gives sums over `BLOCK` steps; a loop over the blocks, from the last to the first, completes
    them. All powers of decay are at most 1, so large factors never reduce the precision.

    Args:
        values_BT: finite numbers; converted to float64.
        decay_B: factor of each row `[B]`, or of all rows `[1]`; within [0, 1], where 0 ** 0 is 1.

    Returns:
        Float64 `[B, T]`.
    """
    steps = values_BT.shape[1]
    sums_BW = pad(values_BT.double(), [0, -steps % BLOCK])
    spare_BW = torch.empty_like(sums_BW)
    decay_D1 = decay_B.to(values_BT.device, torch.float64)[:, None]
    reach = 1
    while reach < min(BLOCK, steps):
        near_BW, far_BW = sums_BW[:, :-reach], sums_BW[:, reach:]
        torch.addcmul(near_BW, far_BW, decay_D1, out=spare_BW[:, :-reach])
        spare_BW[:, -reach:] = sums_BW[:, -reach:]
        sums_BW, spare_BW = spare_BW, sums_BW
        decay_D1, reach = decay_D1.square(), 2 * reach
    from_last = torch.split(sums_BW, BLOCK, dim=1)[::-1]
    for far_BC, near_BC in pairwise(from_last):
        near_BC.addcmul_(far_BC, decay_D1)
    return sums_BW[:, :steps]
