"""Choice of the tokens that reduce the entropy most, and a reproducible draw among tokens.

The covariance of log-prob and advantage needs means over all trained tokens of an update. It is
therefore computed once, on the driver, before the update is split (`SumLoss.prepare`): a
micro-batch would have other means. It uses `old_logprobs`, because the log-probs during the update
are not known yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.core.batches import RolloutBatch


def covariance(batch: RolloutBatch) -> Tensor:
    """Return (log p - mean log p) * (A - mean A) per token (arXiv 2505.22617, equation 10).

    The means are over all trained tokens. The result is float64 `[B, T]`, -inf outside the loss
    mask.

    Raises:
        ValueError: `old_logprobs` or `advantages` are not set.
    """
    old_BT = batch.require("old_logprobs", made_by="add_logprobs")
    advantages_BT = batch.require("advantages", made_by="add_advantages")
    mask_BT = batch.loss_mask
    found_BT = _centred(old_BT, mask_BT) * _centred(advantages_BT, mask_BT)
    return found_BT.masked_fill(~mask_BT, -torch.inf)


def share_of_tokens(fraction: float, mask_BT: Tensor) -> int:
    """Return `fraction` times the number of trained tokens, rounded down, and at least 1."""
    return max(1, int(fraction * int(mask_BT.sum())))


def largest(values_BT: Tensor, count: int) -> Tensor:
    """Mark the `count` largest finite values (all, if there are fewer), bool `[B, T]`."""
    flat = values_BT.flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(min(count, len(flat))).indices] = True
    return chosen.view_as(values_BT) & values_BT.isfinite()


def draw(candidates_BT: Tensor, count: int, batch: RolloutBatch) -> Tensor:
    """Draw `count` of the candidates (all, if there are fewer), as bool `[B, T]`.

    Each token gets a pseudo-random number that depends only on the tokens of its row and on its
    position; the lowest numbers win. The draw thus needs no random state and does not depend on the
    order of the rows or on padding.
    """
    # Float64 holds every integer below 2**53. The largest negated numbers are the lowest numbers.
    lots_BT = _lots(batch.tokens, batch.lengths).bitwise_and(2**53 - 1).double()
    return largest((-lots_BT).masked_fill(~candidates_BT, -torch.inf), count)


def _centred(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the values minus their mean over the mask, float64 `[B, T]`. Positions outside the
    mask hold minus this mean."""
    values_BT = values_BT.double().masked_fill(~mask_BT, 0.0)
    return values_BT - values_BT.sum() / mask_BT.sum().clamp(min=1)


def _lots(tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Return a pseudo-random number per token, int64 `[B, T]`, uniform over [0, 2**63)."""
    positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    words_BT = _mix(_mix(tokens_BT) + positions_T)
    rows_B1 = words_BT.masked_fill(positions_T >= lengths_B[:, None], 0).sum(1, keepdim=True)
    return _mix(_mix(rows_B1) + positions_T)


def _mix(values: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to int64, with wrap-around; the result is not negative."""
    values = values + -7046029254386353131  # 2**64 / golden ratio, as a signed integer
    values = (values ^ _shift(values, 30)) * -4658895280553007687
    values = (values ^ _shift(values, 27)) * -7723592293110705685
    return (values ^ _shift(values, 31)).bitwise_and(2**63 - 1)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zero bits; the shift of torch would copy the sign bit."""
    return (values >> bits).bitwise_and(2 ** (64 - bits) - 1)
