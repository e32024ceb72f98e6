"""What policy terms share: log-ratios, statistics of a row, and the metrics that all report.

A row is a whole sample in every micro-batch, so its sums and means, taken over the loss mask,
depend on no split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.kl import k3
from roll.algorithms.loss_interface import PolicyTerms
from roll.core.batches import RolloutBatch

LOG_RATIO_LIMIT = 20.0
"""Of a log-ratio before exp, so that no ratio overflows; beyond it the gradient is zero."""


def log_ratio(terms: PolicyTerms, batch: RolloutBatch) -> Tensor:
    """`[B, T]`, log(new / old). Without `old_logprobs` the policy is its own past: 0, with the
    gradient of the log-prob."""
    old_BT = batch.old_logprobs
    return terms.logprobs_BT - (terms.logprobs_BT.detach() if old_BT is None else old_BT)


def bounded_exp(log_values: Tensor) -> Tensor:
    """exp of the argument, which is clamped to +-20."""
    return log_values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def unit(logprobs_BT: Tensor) -> Tensor:
    """Exactly 1, with the gradient of the log-prob: `w * unit(logprobs)` has the gradient of
    `w * logprobs` and the value `w`, so that loss curves of all terms can be compared."""
    return (logprobs_BT - logprobs_BT.detach()).exp()


def row_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`[B, 1]`, over the masked tokens; added up in float64, in the dtype of the values."""
    return values_BT.double().masked_fill(~mask_BT, 0.0).sum(1, keepdim=True).to(values_BT.dtype)


def row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`[B, 1]`, over the masked tokens; 0 for a row without any."""
    sums_B1 = values_BT.double().masked_fill(~mask_BT, 0.0).sum(1, keepdim=True)
    return (sums_B1 / mask_BT.sum(1, keepdim=True).clamp(min=1)).to(values_BT.dtype)


def clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and where the clip cuts off
    the gradient (as 0 and 1, detached)."""
    plain_BT = -ratio_BT * advantages_BT
    clipped_BT = -ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT
    cut_BT = (clipped_BT > plain_BT).to(ratio_BT.dtype)
    return torch.maximum(plain_BT, clipped_BT), cut_BT


def ratio_metrics(log_ratio_BT: Tensor, ratio_BT: Tensor) -> dict[str, Tensor]:
    """`ratio/mean`, of the ratio that the term uses, and `approx_kl`, k3 of KL(old || new) per
    token; 1 and 0 in the first update of a step. Detached."""
    gap_BT = log_ratio_BT.detach()
    return {
        "ratio/mean": ratio_BT.detach(),
        "approx_kl": k3(torch.zeros_like(gap_BT), gap_BT),
    }
