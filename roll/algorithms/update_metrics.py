"""Metrics of the advantages of an update."""

from __future__ import annotations

from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics


def advantage_metrics(update: RolloutBatch, *, ranks: int = 1) -> Metrics:
    """Return metrics of the advantages and token weights of one update, or of one rank's rows of
    it, which are then merged with those of all other data-parallel ranks.

    `advantage/mean` is weighted as the loss is; the loss of an on-policy update must be minus this
    number. `advantage/abs_mean` is an unweighted mean over trained tokens. `token_weights/sum` is 1
    if the aggregation is a mean.

    Args:
        ranks: number of parts whose metrics are merged.
    """
    mask_BT = update.loss_mask  # numbers outside it would change the rounding of the sums
    weights_N = update.require("token_weights", made_by="updates")[mask_BT].double()
    advantages_N = update.require("advantages", made_by="add_advantages")[mask_BT].double()
    return Metrics(
        {
            "advantage/mean": Mean((advantages_N * weights_N).sum().item(), 1 / ranks),
            "advantage/abs_mean": Mean(advantages_N.abs().sum().item(), len(advantages_N)),
            "token_weights/sum": Mean(weights_N.sum().item(), 1 / ranks),
        }
    )
