"""Rewards of tokens from the log-probs of a language model that was trained on outcomes."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.masking import only
from roll.core.batches import RolloutBatch
from roll.core.metrics import Mean, Metrics


def implicit_rewards(
    logprobs_BT: Tensor, ref_BT: Tensor, mask_BT: Tensor, *, beta: float
) -> Tensor:
    """Return beta * (log-prob - log-prob under the reference) of each token, float32 `[B, T]`, 0
    outside the mask (PRIME, arXiv 2502.01456, equation 3).

    Args:
        logprobs_BT: log-probs of the tokens under the model that was trained on outcomes.
        ref_BT: those under the reference.
        mask_BT: True where a token is trained, bool.
        beta: factor of the log-ratio.
    """
    return only(beta * (logprobs_BT.double() - ref_BT.double()), mask_BT).float()


def implicit_metrics(batch: RolloutBatch) -> Metrics:
    """Return `process_reward/token_abs_mean`, the mean size of the implicit rewards of trained
    tokens; ValueError without these."""
    rewards_BT = batch.require("implicit_rewards", made_by="add_implicit_rewards")
    total = rewards_BT.double().abs().sum().item()
    return Metrics({"process_reward/token_abs_mean": Mean(total, int(batch.loss_mask.sum()))})
