"""The squared log-ratio, of a token or of a whole response, spread over the tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from roll.algorithms.losses.policy.ratio import row_sums

Level = Literal["token", "sequence"]


def squared_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """`[B, T]`. Per token: its square. Per sequence: the square of the row's sum, an equal share on
    each trained token, so that the shares of a row add up to it.

    Not clamped: a square cannot overflow, and a clamp would end the pull back just where the
    policy has gone furthest.
    """
    if level == "token":
        return log_ratio_BT.square()
    tokens_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    shares_B1 = row_sums(log_ratio_BT, mask_BT).square() / tokens_B1
    return shares_B1.expand_as(log_ratio_BT)
