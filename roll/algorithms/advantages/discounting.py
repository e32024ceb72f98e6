"""Geometric discounting along tokens or steps, without a loop over them."""

from __future__ import annotations

import torch
from torch import Tensor


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
    the sum from t + n; so there are as many passes as T has binary digits. All powers are at most
    1, so no value costs its neighbours precision.

    Args:
        values_BT: finite; computed in float64.
        decay_B: `[B]`, or `[1]` for all rows; within [0, 1], where 0 ** 0 is 1.

    Returns:
        Float64 `[B, T]`.
    """
    sums_BT = values_BT.to(torch.float64, copy=True)
    spare_BT = torch.empty_like(sums_BT)
    decay_D1 = decay_B.to(values_BT.device, torch.float64)[:, None]
    reach, steps = 1, values_BT.shape[1]
    while reach < steps:
        near_BT, far_BT = sums_BT[:, :-reach], sums_BT[:, reach:]
        torch.addcmul(near_BT, far_BT, decay_D1, out=spare_BT[:, :-reach])
        spare_BT[:, -reach:] = sums_BT[:, -reach:]
        sums_BT, spare_BT = spare_BT, sums_BT
        decay_D1, reach = decay_D1.square(), 2 * reach
    return sums_BT
