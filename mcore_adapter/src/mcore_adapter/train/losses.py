"""Losses as sums over tokens or pairs; who adds them up divides by the number in the whole step."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.train.settings import Dpo

TOKEN_METRICS = ("loss",)
PAIR_METRICS = ("loss", "accuracy", "chosen_reward", "rejected_reward")


def token_sums(logprobs_N: Tensor) -> dict[str, Tensor]:
    """Negative log-likelihood, natural logarithm."""
    return {"loss": -logprobs_N.sum()}


def pair_sums(logprobs_S: Tensor, reference_S: Tensor, dpo: Dpo) -> dict[str, Tensor]:
    """DPO (arXiv 2305.18290, eq. 7), with labels smoothed as in its conservative form.

    Args:
        logprobs_S: of whole answers, natural logarithm: chosen, rejected, chosen, ...
        reference_S: the same under the model that training started from.
    """
    reward_P2 = dpo.beta * (logprobs_S - reference_S).view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    smoothing = dpo.label_smoothing
    loss_P = -(1 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)
    return {
        "loss": loss_P.sum(),
        "accuracy": (margin_P > 0).sum(),
        "chosen_reward": reward_P2[:, 0].sum(),
        "rejected_reward": reward_P2[:, 1].sum(),
    }
