"""DPPO (divergence PPO): a bound on the change of the distribution instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics, unit
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import DppoConfig
from roll.core.batches import RolloutBatch

SURE = -1e-7
"""Largest log-prob in the KL divergence: float32 rounds the log-prob of a likelier token to 0, as
if all other tokens were impossible."""


def binary_divergence(old_BT: Tensor, new_BT: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence of two distributions over the events "this token" and "any other", a
    lower bound of that over all tokens (arXiv 2602.04879, equations 13 and 14), `[B, T]`.

    With p = exp(old) and q = exp(new), `tv` is |p - q|, the total variation, and `kl` is
    p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)).

    Args:
        old_BT: log-probs of the tokens under the old policy, and `new_BT` under the new one.
        kind: divergence to compute.
    """
    if kind == "tv":
        return (old_BT.exp() - new_BT.exp()).abs()
    p_BT, q_BT = old_BT.double().clamp(max=SURE), new_BT.double().clamp(max=SURE)
    this_BT = p_BT.exp() * (p_BT - q_BT)
    others_BT = -torch.expm1(p_BT) * (_log_rest(p_BT) - _log_rest(q_BT))
    return (this_BT + others_BT).to(new_BT.dtype)


def _log_rest(logprobs_BT: Tensor) -> Tensor:
    """Return log(1 - exp(log-prob)) of log-probs below 0."""
    return torch.log(-torch.expm1(logprobs_BT))


@LOSSES.register(DppoConfig)
@dataclass(frozen=True)
class Dppo:
    """Loss with the gradient of -M * min(sg(ratio), upper) * A * log p (arXiv 2602.04879), where

        M = 0    where D > threshold, and (A > 0 and ratio > 1) or (A < 0 and ratio < 1)
        M = 1    elsewhere

    sg stops the gradient; D is `binary_divergence`. A token whose probability has moved too far
    loses its gradient, but only while the gradient would move it further. The value is -M *
    min(ratio, upper) * A. At ratio 1 the loss is -A, and its gradient with respect to the log-prob
    is -A.
    """

    config: DppoConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, `approx_kl`; `clip_fraction`, the share of tokens that lose their
        gradient; `dppo/divergence`, the mean of D.
        """
        config, new_BT = self.config, terms.logprobs_BT.detach()
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT).detach()
        old_BT = new_BT if batch.old_logprobs is None else batch.old_logprobs
        divergence_BT = binary_divergence(old_BT, new_BT, config.divergence)
        # Above zero where the gradient would move the token further from the old policy.
        away_BT = log_ratio_BT.detach() * advantages_BT
        lost_BT = (away_BT > 0) & (divergence_BT > config.bound)
        bounded_BT = ratio_BT if config.upper is None else ratio_BT.clamp(max=config.upper)
        weight_BT = bounded_BT.masked_fill(lost_BT, 0.0)
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["clip_fraction"] = lost_BT.to(ratio_BT.dtype)
        metrics_BT["dppo/divergence"] = divergence_BT
        loss_BT = -weight_BT * unit(terms.logprobs_BT) * advantages_BT
        return TokenLoss(loss_BT=loss_BT, metrics_BT=metrics_BT)
