"""Losses of pairs and of labelled responses; see `roll.config.algorithm.preferences`.

The loss of a whole response, or of a pair, is assigned to each of its trained tokens. With token
weights whose sum is the same for every row (`Aggregation.SEQUENCE_MEAN`), the weighted sum over the
update is then the mean over pairs. Axis letters: B rows, T tokens, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.algorithm.preferences import (
    HingeConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PairLoss,
    RobustConfig,
    SigmoidConfig,
    SimpoConfig,
)
from roll.core.batches import LabelledBatch, PreferenceBatch


def response_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum of the values over the trained tokens of each row, `[B]`."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum(1)


def spread(values_P: Tensor, mask_BT: Tensor) -> Tensor:
    """Copy the value of each pair, or of each row, to all tokens of its rows, `[B, T]`. The two
    rows of a pair are adjacent; of `mask_BT`, only the shape is used."""
    values_B = values_P.repeat_interleave(len(mask_BT) // len(values_P))
    return values_B[:, None].expand(mask_BT.shape)


@dataclass(frozen=True, slots=True)
class PairedLoss:
    """Loss that compares the two responses of a pair; `config` selects the formula."""

    config: PairLoss

    def __call__(self, terms: PolicyTerms, batch: PreferenceBatch) -> TokenLoss:
        """Compute the loss; raise ValueError if the formula has a reference model and `ref_sums`
        are not set. Parts and metrics are those of `paired_loss`."""
        ref_B = None
        if self.config.needs_reference:
            ref_B = batch.require("ref_sums", made_by="add_reference")
        return paired_loss(self.config, terms.logprobs_BT, batch.loss_mask, ref_B)


def paired_loss(
    config: PairLoss, logprobs_BT: Tensor, mask_BT: Tensor, ref_B: Tensor | None
) -> TokenLoss:
    """Compute the loss of pairs, on all tokens of their rows.

    The parts are `preference` and, with `sft_coef`, `sft`. Metrics: `preference_loss`, `accuracy`,
    `margin`, `reward_chosen`, `reward_rejected`; the last three are times `beta`.

    Args:
        config: formula of the loss and its parameters.
        logprobs_BT: log-probs of the tokens; rows 0, 2, 4, ... are the chosen ones, and the row
            after each of them is the rejected one.
        mask_BT: True where a token is trained, bool.
        ref_B: sum of the log-probs of each row's trained tokens under the reference; None if the
            formula has none.
    """
    counts_B = mask_BT.sum(1).clamp(min=1)
    sums_B = response_sums(logprobs_BT, mask_BT)
    logprobs_B = sums_B / counts_B if config.average_logprobs else sums_B
    rewards_B = logprobs_B
    if ref_B is not None:
        rewards_B = logprobs_B - (ref_B / counts_B if config.average_logprobs else ref_B)
    chosen_P, rejected_P = rewards_B[::2], rewards_B[1::2]
    loss_P = pair_loss(config, chosen_P, rejected_P)
    loss_BT = spread(loss_P, mask_BT)
    parts_BT = {"preference": loss_BT.detach()}
    if config.sft_coef:
        # The factor 2 is there because only one of the two rows of a pair is imitated.
        chosen_B1 = (torch.arange(len(mask_BT), device=mask_BT.device) % 2 == 0)[:, None]
        nll_BT = -2 * config.sft_coef * logprobs_BT.masked_fill(~chosen_B1, 0.0)
        loss_BT = loss_BT + nll_BT
        parts_BT["sft"] = nll_BT.detach()
    return TokenLoss(
        loss_BT=loss_BT,
        parts_BT=parts_BT,
        metrics_B=_pair_metrics(config.beta * rewards_B.detach(), loss_P.detach()),
    )


def pair_loss(config: PairLoss, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Compute the loss of each pair, `[P]`.

    Args:
        config: formula of the loss and its parameters.
        chosen_P: log-prob of the chosen response, summed or averaged over its tokens, minus the
            log-prob under the reference model if the loss uses one.
        rejected_P: the same quantity for the rejected response.

    Raises:
        TypeError: the config is that of no loss of pairs.
    """
    beta, difference_P = config.beta, chosen_P - rejected_P
    match config:
        case SigmoidConfig(label_smoothing=e):
            return -(1 - e) * logsigmoid(beta * difference_P) - e * logsigmoid(-beta * difference_P)
        case RobustConfig(label_smoothing=e):
            right_P, wrong_P = -logsigmoid(beta * difference_P), -logsigmoid(-beta * difference_P)
            return ((1 - e) * right_P - e * wrong_P) / (1 - 2 * e)
        case HingeConfig():
            return relu(1 - beta * difference_P)
        case IpoConfig():
            return (difference_P - 1 / (2 * beta)).square()
        case SimpoConfig(gamma=gamma):
            return -logsigmoid(beta * difference_P - gamma)
        case OrpoConfig():
            return -beta * logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
    raise TypeError(f"{type(config).__name__} is no loss of pairs")


def _log_odds(logprobs_P: Tensor) -> Tensor:
    """Return log(P / (1 - P)) from log P; precise for small P, and finite for P = 1."""
    below_P = logprobs_P.clamp(max=-1e-7)
    return below_P - torch.log(-torch.expm1(below_P))


def _pair_metrics(rewards_B: Tensor, loss_P: Tensor) -> dict[str, Tensor]:
    """Return metrics `[B]`, equal in both rows of a pair, so a mean over rows is one over pairs.
    `rewards_B` holds the chosen and the rejected response of a pair in turn."""
    chosen_P, rejected_P = rewards_B[::2], rewards_B[1::2]
    # Equal rewards count as half right, so that an untrained policy has the accuracy 0.5.
    right_P = (chosen_P > rejected_P).float() + 0.5 * (chosen_P == rejected_P).float()
    named_P = {
        "preference_loss": loss_P,
        "accuracy": right_P,
        "margin": chosen_P - rejected_P,
        "reward_chosen": chosen_P,
        "reward_rejected": rejected_P,
    }
    return {name: value_P.repeat_interleave(2) for name, value_P in named_P.items()}


@dataclass(frozen=True, slots=True)
class LabelledLoss:
    """Loss of KTO (arXiv 2402.01306) on single responses that are labelled good or bad."""

    config: KtoConfig

    def __call__(self, terms: PolicyTerms, batch: LabelledBatch) -> TokenLoss:
        """Compute the loss; raise ValueError if `ref_sums` or `divergence` are not set.

        Metrics: `preference_loss`, `accuracy`, `margin`, `divergence`.
        """
        config, mask_BT = self.config, batch.loss_mask
        ref_B = batch.require("ref_sums", made_by="add_reference")
        divergence_B = batch.require("divergence", made_by="make_batch")
        rewards_B = response_sums(terms.logprobs_BT, mask_BT) - ref_B
        sign_B = torch.where(batch.desirable, 1.0, -1.0)
        weight_B = torch.where(batch.desirable, config.desirable_weight, config.undesirable_weight)
        above_B = config.beta * sign_B * (rewards_B - divergence_B)
        loss_B = weight_B * (1 - torch.sigmoid(above_B))
        seen_B = above_B.detach()
        return TokenLoss(
            loss_BT=spread(loss_B, mask_BT),
            metrics_B={
                "preference_loss": loss_B.detach(),
                "accuracy": (seen_B > 0).float() + 0.5 * (seen_B == 0).float(),
                "margin": seen_B,
                "divergence": divergence_B,
            },
        )
