"""Correction of the mismatch between engine and trainer: importance weights and rejection.

The engine samples the tokens, and the trainer, whose log-probs differ slightly, learns from them.
With L = log p_trainer - log p_engine of a token, a ratio is computed at one of four levels:

    token exp(L)    turn exp(sum over the turn)    sequence exp(sum)    geometric exp(mean)

A turn is a maximal run of True in a row of `loss_mask`. All sums are over the loss mask, in
float64, and clamped to +-20 before exp.

Importance weights multiply the policy's loss terms and do not change `loss_mask`: a token of weight
0 still counts in the means, as in IcePop and TIS. Rejection removes tokens from `loss_mask`: no
loss term trains a rejected token. Token weights are computed from the mask afterwards, so means are
taken over the remaining tokens. The order within a step is therefore: old log-probs, advantages (a
rejected token stays part of its episode), `correct`, token weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from roll.algorithms.losses.policy.ratio import bounded_exp
from roll.algorithms.mismatch import correction_metrics, weight_metrics
from roll.config.algorithm.correction import (
    CorrectionConfig,
    RatioLevel,
    RejectConfig,
    WeightConfig,
)
from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics


def correct(batch: RolloutBatch, config: CorrectionConfig) -> tuple[RolloutBatch, Metrics]:
    """Return the batch with `importance_weights`, if configured, and a smaller `loss_mask`.

    A pure function for the driver; `batch` must hold all rows of a step. All ratios are computed
    before any rejection, so the order of the rejection rules does not matter.

    Raises:
        ValueError: `old_logprobs` or `rollout_logprobs` are not set.
    """
    trainer_BT = batch.require("old_logprobs", made_by="add_logprobs")
    engine_BT = batch.require("rollout_logprobs", made_by="an engine that returns log-probs")
    mask_BT = batch.loss_mask
    gap_BT = (trainer_BT.double() - engine_BT.double()).masked_fill(~mask_BT, 0.0)
    kept_BT = mask_BT & ~rejected(gap_BT, mask_BT, config.reject)
    metrics = correction_metrics(gap_BT, engine_BT.double(), mask_BT, kept_BT)
    batch = replace(batch, loss_mask=kept_BT)
    if config.weight is None:
        return batch, metrics
    weights_BT, bounded_BT = importance_weights(gap_BT, mask_BT, config.weight)
    metrics = metrics | weight_metrics(weights_BT[mask_BT], bounded_BT[mask_BT])
    weights_BT = weights_BT.masked_fill(~kept_BT, 0.0).float()
    return replace(batch, importance_weights=weights_BT), metrics


def use_engine_logprobs(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch with the engine's log-probs as `old_logprobs` (`old_logprobs: rollout`).

    The trainer then needs no forward pass for old log-probs. The ratio in the loss becomes trainer
    over engine, which contains the correction.

    Raises:
        ValueError: `rollout_logprobs` are not set.
    """
    engine_BT = batch.require("rollout_logprobs", made_by="an engine that returns log-probs")
    return replace(batch, old_logprobs=engine_BT)


def ratios(gap_BT: Tensor, mask_BT: Tensor, level: RatioLevel) -> Tensor:
    """Return for each token the ratio of its token, turn or sequence, float64 `[B, T]`.

    The result is 1 outside the mask.

    Args:
        gap_BT: float64, log p_trainer - log p_engine; zero outside the mask.
        mask_BT: bool, the trained tokens.
        level: unit that a ratio is computed for.
    """
    match level:
        case "token":
            log_BT = gap_BT
        case "turn":
            log_BT = _turn_sums(gap_BT, mask_BT)
        case "sequence":
            log_BT = gap_BT.sum(1, keepdim=True).expand_as(gap_BT)
        case "geometric":
            tokens_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
            log_BT = (gap_BT.sum(1, keepdim=True) / tokens_B1).expand_as(gap_BT)
    return bounded_exp(log_BT).masked_fill(~mask_BT, 1.0)


def importance_weights(
    gap_BT: Tensor, mask_BT: Tensor, config: WeightConfig
) -> tuple[Tensor, Tensor]:
    """Return the bounded importance weights, and where the ratio was outside the bounds.

    Returns:
        Weights, float64 `[B, T]`, 0 outside the mask; and bool `[B, T]`.
    """
    ratio_BT = ratios(gap_BT, mask_BT, config.level)
    outside_BT = _outside(ratio_BT, config.lower, config.upper)
    match config.mode:
        case "truncate":
            weights_BT = ratio_BT.clamp(config.lower, config.upper)
        case "mask":
            weights_BT = ratio_BT.masked_fill(outside_BT, 0.0)
    return weights_BT.masked_fill(~mask_BT, 0.0), outside_BT


def rejected(gap_BT: Tensor, mask_BT: Tensor, rules: Sequence[RejectConfig]) -> Tensor:
    """Return the trained tokens that at least one rule rejects, bool `[B, T]`."""
    found_BT = torch.zeros_like(mask_BT)
    for rule in rules:
        found_BT = found_BT | _outside(ratios(gap_BT, mask_BT, rule.level), rule.lower, rule.upper)
    return found_BT & mask_BT


def _outside(ratio_BT: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Mark the ratios below `lower` or above `upper`, bool `[B, T]`; None: no such bound."""
    outside_BT = torch.zeros_like(ratio_BT, dtype=torch.bool)
    if lower is not None:
        outside_BT = outside_BT | (ratio_BT < lower)
    if upper is not None:
        outside_BT = outside_BT | (ratio_BT > upper)
    return outside_BT


def _turn_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return for each trained token the sum of the values over its turn, `[B, T]`.

    Values at tokens outside the turns are meaningless.
    """
    rows, length = mask_BT.shape
    before_BT = torch.nn.functional.pad(mask_BT[:, :-1], [1, 0], value=False)
    turn_BT = (mask_BT & ~before_BT).cumsum(1)
    # A row has at most `length` turns; number 0 stands for the tokens before the first turn.
    index_N = (
        turn_BT + torch.arange(rows, device=turn_BT.device)[:, None] * (length + 1)
    ).flatten()
    sums_N = values_BT.new_zeros(rows * (length + 1))
    sums_N = sums_N.index_add(0, index_N, values_BT.masked_fill(~mask_BT, 0.0).flatten())
    return sums_N[index_N].view_as(values_BT)
