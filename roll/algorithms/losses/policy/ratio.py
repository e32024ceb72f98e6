"""Helper functions of the policy losses: log-ratios, sums and means of a row, common metrics.

Every micro-batch holds whole samples as rows, so the sums and means of a row over the loss mask do
not depend on how the batch is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.kl import k3
from roll.algorithms.loss_interface import PolicyTerms
from roll.core.batches import RolloutBatch

LOG_RATIO_LIMIT = 20.0
"""Largest |log-ratio| before exp, so that no ratio overflows; beyond it the gradient is zero."""


def log_ratio(terms: PolicyTerms, batch: RolloutBatch) -> Tensor:
    """Return log(new / old), `[B, T]`.

    Without `old_logprobs`, the current policy is also the old one: the value is 0, with the
    gradient of the log-prob.
    """
    old_BT = batch.old_logprobs
    return terms.logprobs_BT - (terms.logprobs_BT.detach() if old_BT is None else old_BT)


def bounded_exp(log_values: Tensor) -> Tensor:
    """Return exp of the argument after clamping it to +-20."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def unit(logprobs_BT: Tensor) -> Tensor:
    """Return exactly 1, with the gradient of the log-prob, `[B, T]`.

    `w * unit(logprobs)` has the gradient of `w * logprobs` and the value `w`, so that loss curves
    of different terms can be compared.
    """
    return (logprobs_BT - logprobs_BT.detach()).exp()


def row_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum of each row over the tokens where the mask is True, `[B, 1]`.

    The sum is computed in float64 and returned in the dtype of the values.
    """
    return values_BT.double().masked_fill(~mask_BT, 0.0).sum(1, keepdim=True).to(values_BT.dtype)


def row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean of each row over the tokens where the mask is True, `[B, 1]`.

    The mean is computed in float64 and returned in the dtype of the values. It is 0 for a row
    without such tokens.
    """
    sums_B1 = values_BT.double().masked_fill(~mask_BT, 0.0).sum(1, keepdim=True)
    return (sums_B1 / mask_BT.sum(1, keepdim=True).clamp(min=1)).to(values_BT.dtype)


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute the loss -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    Returns:
        The loss `[B, T]`; and 1 where the clip makes the gradient zero, 0 elsewhere, `[B, T]`,
        detached.
    """
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    cut_BT = (clipped_BT > plain_BT).to(ratio_BT.dtype)
    return torch.maximum(plain_BT, clipped_BT), cut_BT


def ratio_metrics(log_ratio_BT: Tensor, ratio_BT: Tensor) -> dict[str, Tensor]:
    """Return the metrics `ratio/mean` and `approx_kl` per token, detached.

    `ratio/mean` is the ratio that the loss term uses, 1 in the first update of a step. `approx_kl`
    is the estimate k3 of KL(old || new), 0 in the first update of a step.
    """
    gap_BT = log_ratio_BT.detach()
    return {
        "ratio/mean": ratio_BT.detach(),
        "approx_kl": k3(torch.zeros_like(gap_BT), gap_BT),
    }
