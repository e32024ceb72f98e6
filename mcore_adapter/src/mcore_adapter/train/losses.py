"""Losses as sums over tokens or pairs.

The caller adds the sums of all micro-batches, and divides by the number of tokens or pairs of the
whole step.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_adapter.train.settings import Dpo

TOKEN_METRICS = ("loss",)
PAIR_METRICS = ("loss", "accuracy", "chosen_reward", "rejected_reward")


def token_sums(logprobs_N: Tensor) -> dict[str, Tensor]:
    """Return the negative log-likelihood, summed over tokens, as `loss`.

    Args:
        logprobs_N: natural log-probabilities `[N]` of the trained tokens.
    """
    return {"loss": -logprobs_N.sum()}


def pair_sums(logprobs_S: Tensor, reference_S: Tensor, dpo: Dpo) -> dict[str, Tensor]:
    """Return the metrics of DPO, summed over pairs, by name (see `PAIR_METRICS`).

    The loss is that of arXiv 2305.18290, eq. 7, with labels smoothed as in conservative DPO.

    Args:
        logprobs_S: natural log-probabilities `[S]` of whole answers: chosen, rejected, chosen, ...
        reference_S: the same under the model that training started from.
        dpo: options of DPO.
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
