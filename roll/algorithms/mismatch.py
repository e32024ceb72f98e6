"""How far the trainer's log-probs are from those that the engine reported for the same tokens.

With equal weights on both sides this is numerical noise (1e-6 in float32); anything larger is a
bug or a sampling option that the trainer does not know (`top_p`, `top_k`).
"""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.kl import k3
from roll.core.batches import RolloutBatch
from roll.core.metrics import Max, Mean, Metrics

FACTOR_LIMIT = 20.0
"""Of |difference| before exp, so that one token cannot make the mean infinite."""


def mismatch_metrics(batch: RolloutBatch) -> Metrics:
    """Over the tokens of `loss_mask`; empty without engine log-probs or without tokens.

    `mismatch/logprob_abs_mean` and `_max` are in nats, `mismatch/kl` is k3 of
    KL(engine || trainer), `mismatch/probability_factor` is the mean of exp |difference|.

    Raises:
        ValueError: the trainer's log-probs are not set.
    """
    if batch.rollout_logprobs is None:
        return Metrics()
    trainer = batch.require("old_logprobs", made_by="add_old_logprobs")[batch.loss_mask].double()
    engine = batch.rollout_logprobs[batch.loss_mask].double()
    count = engine.numel()
    if count == 0:
        return Metrics()
    gap = (trainer - engine).abs()

    def mean(values: Tensor) -> Mean:
        return Mean(values.sum().item(), count)

    return Metrics(
        {
            "mismatch/logprob_abs_mean": mean(gap),
            "mismatch/logprob_abs_max": Max(gap.max().item()),
            "mismatch/kl": mean(k3(engine, trainer)),
            "mismatch/probability_factor": mean(gap.clamp(max=FACTOR_LIMIT).exp()),
        }
    )
