"""Squared log-ratio of a token or of a whole response, spread over the tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from roll.algorithms.losses.policy.ratio import row_sums

Level = Literal["token", "sequence"]


def squared_log_ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """Return the squared log-ratio as a value per token, `[B, T]`.

    With `level="token"`, each token gets the square of its own log-ratio. With `level="sequence"`,
    the log-ratios of a row are summed and squared, and each trained token gets an equal share, so
    that the shares of a row add up to the square.

    The result is not clamped. A square of a log-ratio does not overflow, and a clamp would remove
    the gradient where the policy has moved furthest.
    """
    if level == "token":
        return log_ratio_BT.square()
    tokens_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    shares_B1 = row_sums(log_ratio_BT, mask_BT).square() / tokens_B1
    return shares_B1.expand_as(log_ratio_BT)
