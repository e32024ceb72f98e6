"""Forward passes over samples whose tokens the driver does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from roll.core.batches import RolloutBatch, ScoredSamples, TokenBatch
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.distributed.remote_values import store
from roll.rollout.dense import dense


def score_samples(
    table: SampleTable,
    logprobs: Callable[[TokenBatch], Tensor],
    *,
    measure: Callable[[RolloutBatch], Metrics] | None = None,
    keeps: bool = True,
) -> ScoredSamples:
    """Compute log-probs of the rows of a rank and leave them in the object store of its node.

    Args:
        table: rows of this rank.
        logprobs: forward pass, which returns `[B, T]`.
        measure: function that computes metrics of the batch, whose `old_logprobs` are the new ones.
        keeps: False on ranks whose results are not used: they store nothing.
    """
    batch = dense(table)
    values_BT = logprobs(batch.inputs()).detach().float().cpu()
    if not keeps:
        return ScoredSamples([], Metrics())
    metrics = Metrics() if measure is None else measure(replace(batch, old_logprobs=values_BT))
    rows = [
        row[:length].numpy().copy()
        for row, length in zip(values_BT, table.lengths.tolist(), strict=True)
    ]
    return ScoredSamples(store(rows, [row.nbytes for row in rows]), metrics)
