"""Loss of the critic: squared error to the returns, with a bound on the change of the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from roll.algorithms.loss_interface import TokenLoss, ValueTerms
from roll.config.algorithm.losses import ValueLossConfig
from roll.core.batches import RolloutBatch


@dataclass(frozen=True)
class ClippedValueLoss:
    """Loss 0.5 * max((v - R)**2, (clip(v, old - clip, old + clip) - R)**2) per token.

    This is the value loss of PPO's code; arXiv 2005.12729 examines whether the clip helps. If
    `clip` is None, the loss is 0.5 * (v - R)**2. In the first update of a step, v equals the old
    value: nothing is clipped, and the gradient is v - R.
    """

    config: ValueLossConfig

    def __call__(self, terms: ValueTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `returns`, and with `clip` also the old `values`.

        Metrics: `value/clip_fraction`, the share of tokens whose gradient is zero because of the
        clip; `value/mean`; and those that `explained_variance` needs: `value/error`,
        `value/squared_error`, `value/return`, `value/squared_return`.
        """
        values_BT = terms.values_BT
        returns_BT = batch.require("returns", made_by="add_advantages")
        error_BT = values_BT - returns_BT
        squares_BT = error_BT.square()
        seen_BT = error_BT.detach()
        metrics_BT = {
            "value/mean": values_BT.detach(),
            "value/error": seen_BT,
            "value/squared_error": seen_BT.square(),
            "value/return": returns_BT,
            "value/squared_return": returns_BT.square(),
        }
        clip = self.config.clip
        if clip is not None:
            old_BT = batch.require("values", made_by="add_values")
            near_BT = old_BT + (values_BT - old_BT).clamp(-clip, clip)
            clipped_BT = (near_BT - returns_BT).square()
            metrics_BT["value/clip_fraction"] = (clipped_BT > squares_BT).to(values_BT.dtype)
            squares_BT = torch.maximum(squares_BT, clipped_BT)
        return TokenLoss(loss_BT=0.5 * squares_BT, metrics_BT=metrics_BT)


def explained_variance(means: Mapping[str, float]) -> float:
    """Return 1 - Var(v - R) / Var(R), from the means that `ClippedValueLoss` reports.

    The means may cover any number of micro-batches and ranks. The result is 1 for a perfect critic,
    0 for a critic that knows only the mean of the returns, and 0 if all returns are equal.

    Raises:
        KeyError: a mean is missing.
    """
    returns = means["value/squared_return"] - means["value/return"] ** 2
    error = means["value/squared_error"] - means["value/error"] ** 2
    # For equal returns the variance is a rounding error of float32 sums, not an exact zero.
    if returns <= 1e-6 * means["value/squared_return"]:
        return 0.0
    return 1.0 - error / returns
