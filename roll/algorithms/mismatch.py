"""Metrics of the difference between the trainer's and the engine's log-probs of the same tokens.

If both sides have equal weights, the difference is numerical noise (1e-6 in float32). A larger one
indicates a bug or a sampling option that the trainer does not know (`top_p`, `top_k`). For tokens
that older weights generated (`rollout.max_staleness`), the difference includes how far the policy
has moved since then, which is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roll.algorithms.kl import k3
from roll.core.batches import RolloutBatch
from roll.core.metrics import Max, Mean, Metric, Metrics

FACTOR_LIMIT = 20.0
"""Largest |difference| of log-probs before exp, so that one token cannot make a mean infinite."""


def token_mismatch(trainer: Tensor, engine: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each mismatch metric per token, in the shape of the arguments; the
    caller averages them. One after the other, because a rank may have many tokens.

    `mismatch/logprob_abs_mean` is |difference| in nats, of which the maximum is reported too;
    `mismatch/kl` is the estimate k3 of KL(engine || trainer); `mismatch/probability_factor` is
    exp |difference|.
    """
    gap = (trainer - engine).abs()
    yield "mismatch/logprob_abs_mean", gap
    yield "mismatch/probability_factor", gap.clamp(max=FACTOR_LIMIT).exp()
    del gap
    yield "mismatch/kl", k3(engine, trainer)


def teacher_metrics(batch: RolloutBatch) -> Metrics:
    """Return `kl/teacher`, an estimate of KL(policy || teacher) in nats per token.

    The estimate is the mean of log p_engine - log p_teacher over the loss mask. The result is empty
    without log-probs of a teacher or of the engine.
    """
    if batch.teacher_logprobs is None or batch.rollout_logprobs is None:
        return Metrics()
    gap_BT = (batch.rollout_logprobs - batch.teacher_logprobs).double()
    return Metrics(
        {"kl/teacher": Mean(gap_BT[batch.loss_mask].sum().item(), int(batch.loss_mask.sum()))}
    )


def mismatch_metrics(batch: RolloutBatch) -> Metrics:
    """Return the means of `token_mismatch` over the loss mask, and `mismatch/logprob_abs_max`.

    The result is empty without log-probs of the engine or without trained tokens.

    Raises:
        ValueError: the trainer's log-probs are not set.
    """
    if batch.rollout_logprobs is None:
        return Metrics()
    trainer = batch.require("old_logprobs", made_by="add_logprobs")[batch.loss_mask].double()
    engine = batch.rollout_logprobs[batch.loss_mask].double()
    count = engine.numel()
    if count == 0:
        return Metrics()
    found: dict[str, Metric] = {}
    for name, values in token_mismatch(trainer, engine):
        found[name] = Mean(values.sum().item(), count)
        if name == "mismatch/logprob_abs_mean":
            found["mismatch/logprob_abs_max"] = Max(values.max().item())
        del values
    return Metrics(found)


def correction_metrics(
    gap_BT: Tensor, engine_BT: Tensor, mask_BT: Tensor, kept_BT: Tensor
) -> Metrics:
    """Return metrics of a correction over the trained tokens; empty without trained tokens.

    `correction/kl_engine_trainer` and `correction/kl_trainer_engine` are k3 estimates of the two
    directions of the KL; the names with `_k1` are the k1 estimates. For the direction
    trainer-engine, the engine's tokens are weighted by their ratios.
    `correction/log_perplexity_gap` is the mean over samples of the trainer's log-perplexity minus
    the engine's, and `correction/log_perplexity_gap_abs` the mean of its absolute value.
    `correction/rejected_tokens` and `correction/rejected_sequences` are fractions.
    `correction/ratio_max` is the largest ratio of a token, and `correction/effective_sample_size`
    is computed from the token ratios without bounds.

    Args:
        gap_BT: float64, log p_trainer - log p_engine; zero outside the mask.
        engine_BT: float64, log p_engine.
        mask_BT: bool, the trained tokens before rejection.
        kept_BT: bool, the trained tokens after rejection.
    """
    count = int(mask_BT.sum())
    if count == 0:
        return Metrics()
    gap_N = gap_BT[mask_BT].clamp(-FACTOR_LIMIT, FACTOR_LIMIT)
    ratio_N = gap_N.exp()
    per_token = {
        "correction/kl_engine_trainer": torch.expm1(gap_N) - gap_N,
        "correction/kl_engine_trainer_k1": -gap_N,
        "correction/kl_trainer_engine": ratio_N * gap_N - torch.expm1(gap_N),
        "correction/kl_trainer_engine_k1": ratio_N * gap_N,
        "correction/rejected_tokens": (~kept_BT)[mask_BT].double(),
    }
    means = {name: Mean(values_N.sum().item(), count) for name, values_N in per_token.items()}
    return _sequence_metrics(gap_BT, engine_BT, mask_BT, kept_BT) | {
        **means,
        "correction/ratio_max": Max(ratio_N.max().item()),
        "correction/effective_sample_size": Mean(effective_sample_size(ratio_N)),
    }


def weight_metrics(weights_N: Tensor, bounded_N: Tensor) -> Metrics:
    """Return metrics of the importance weights in use; empty without weights.

    The metrics are the mean weight (`correction/weight`), the fraction of ratios outside the bounds
    (`correction/bounded_weights`) and `correction/weight_effective_sample_size`.

    Args:
        weights_N: one weight per trained token.
        bounded_N: bool, whether the ratio of the token was outside the bounds.
    """
    count = weights_N.numel()
    if count == 0:
        return Metrics()
    size = effective_sample_size(weights_N)
    return Metrics(
        {
            "correction/weight": Mean(weights_N.sum().item(), count),
            "correction/bounded_weights": Mean(bounded_N.sum().item(), count),
            "correction/weight_effective_sample_size": Mean(size),
        }
    )


def effective_sample_size(weights_N: Tensor) -> float:
    """Return (sum w)**2 / (n * sum w**2), a share of the n samples.

    The result is 1 if all weights are equal, 1 / n if only one is not 0, and 0 if all are 0.
    """
    squares = weights_N.square().sum().item()
    return weights_N.sum().item() ** 2 / (weights_N.numel() * squares) if squares else 0.0


def _sequence_metrics(
    gap_BT: Tensor, engine_BT: Tensor, mask_BT: Tensor, kept_BT: Tensor
) -> Metrics:
    """Return log-perplexities and rejected sequences as means over samples with trained tokens."""
    tokens_B = mask_BT.sum(1)
    trained_B = tokens_B > 0
    count = int(trained_B.sum())
    sizes_B = tokens_B[trained_B]
    engine_B = -engine_BT.masked_fill(~mask_BT, 0.0).sum(1)[trained_B] / sizes_B
    gap_B = -gap_BT.sum(1)[trained_B] / sizes_B
    per_sample = {
        "correction/log_perplexity_engine": engine_B,
        "correction/log_perplexity_trainer": engine_B + gap_B,
        "correction/log_perplexity_gap": gap_B,
        "correction/log_perplexity_gap_abs": gap_B.abs(),
        "correction/rejected_sequences": (kept_BT.sum(1)[trained_B] == 0).double(),
    }
    means = {name: Mean(values_B.sum().item(), count) for name, values_B in per_sample.items()}
    return Metrics(means)
