"""Geometric discounting along tokens or steps, without a loop over them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
"""Steps; a power of 2. Six passes over all numbers, and one through the blocks: 10 passes, which
1024 steps would need without blocks, take a fifth to a quarter longer."""


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

    Sums over the next n steps make those over the next 2n: the sum from t, plus decay ** n times
    the sum from t + n; up to blocks of `BLOCK` steps, which are then walked through from the last
    to the first. All powers are at most 1, so no value costs its neighbours precision.

    Args:
        values_BT: finite; computed in float64.
        decay_B: `[B]`, or `[1]` for all rows; within [0, 1], where 0 ** 0 is 1.

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
