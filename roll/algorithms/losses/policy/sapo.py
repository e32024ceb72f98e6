"""SAPO (soft adaptive policy optimization): a smooth gate instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.algorithms.losses.policy.ratio import bounded_exp, log_ratio, ratio_metrics
from roll.algorithms.registries import LOSSES
from roll.config.algorithm.losses import SapoConfig
from roll.core.batches import RolloutBatch


@LOSSES.register(SapoConfig)
@dataclass(frozen=True)
class Sapo:
    """Loss -f(ratio) * A, where f(x) = sigmoid(tau * (x - 1)) * 4 / tau (arXiv 2511.20347).

    tau is `tau_pos` where A > 0 and `tau_neg` elsewhere. f has slope 1 at ratio 1 and becomes flat
    on both sides; a larger tau makes it flat faster. At ratio 1 the gradient with respect to the
    log-prob is -A; the value is -A * 2 / tau, as in the paper, and not -A.
    """

    config: SapoConfig

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        """Compute the loss; needs `advantages`. Without `old_logprobs` the ratio is 1.

        Metrics: `ratio/mean`, `approx_kl`, and `sapo/gate`, the slope of f: 1 at ratio 1, near 0
        for tokens that the gate suppresses.
        """
        advantages_BT = batch.require("advantages", made_by="add_advantages")
        log_ratio_BT = log_ratio(terms, batch)
        ratio_BT = bounded_exp(log_ratio_BT)
        tau_BT = torch.full_like(ratio_BT, self.config.tau_neg).masked_fill(
            advantages_BT > 0, self.config.tau_pos
        )
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
        metrics_BT = ratio_metrics(log_ratio_BT, ratio_BT)
        metrics_BT["sapo/gate"] = (4 * gate_BT * (1 - gate_BT)).detach()
        return TokenLoss(loss_BT=-gate_BT * (4 / tau_BT) * advantages_BT, metrics_BT=metrics_BT)
