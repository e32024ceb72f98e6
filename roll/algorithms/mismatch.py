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


def token_mismatch(trainer: Tensor, engine: Tensor) -> dict[str, Tensor]:
    """Per token, of any shape; each is to be averaged, and the first also has a maximum.

    `mismatch/logprob_abs_mean` is in nats, `mismatch/kl` is k3 of KL(engine || trainer),
    `mismatch/probability_factor` is exp |difference|.
    """
    gap = (trainer - engine).abs()
    return {
        "mismatch/logprob_abs_mean": gap,
        "mismatch/kl": k3(engine, trainer),
        "mismatch/probability_factor": gap.clamp(max=FACTOR_LIMIT).exp(),
    }


def mismatch_metrics(batch: RolloutBatch) -> Metrics:
    """Over the tokens of `loss_mask`; empty without engine log-probs or without tokens.

    The means of `token_mismatch`, and `mismatch/logprob_abs_max`.

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
    per_token = token_mismatch(trainer, engine)
    means = {name: Mean(values.sum().item(), count) for name, values in per_token.items()}
    largest = Max(per_token["mismatch/logprob_abs_mean"].max().item())
    return Metrics({**means, "mismatch/logprob_abs_max": largest})
