"""What a sample earned: once per sample (`rewards`), and per token on top (`token_rewards`)."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums, discounts
from roll.algorithms.advantages.trained import TrainedTokens
from roll.core.batches import RolloutBatch


def total_rewards(batch: RolloutBatch) -> Tensor:
    """A sample's reward plus all its trained tokens' rewards, float64 `[B]`.

    For estimators that know one number per sample.

    Raises:
        ValueError: the batch has no rewards.
    """
    rewards_B = batch.require("rewards", made_by="assemble").double()
    if batch.token_rewards is None:
        return rewards_B
    return rewards_B + batch.token_rewards.double().masked_fill(~batch.loss_mask, 0).sum(1)


def rewards_to_go(outcome_B: Tensor, batch: RolloutBatch, *, gamma: float) -> Tensor:
    """What each trained token leads to, float64 `[B, T]`, zero outside the loss mask:

        sum over trained j >= t of gamma ** (trained tokens from t to j) * reward_j

    where reward_j is `token_rewards`, plus `outcome_B` on the last trained token.

    Args:
        outcome_B: the samples' rewards, after a baseline if there is one.
        batch: for its loss mask and token rewards.
        gamma: discount per trained token.
    """
    returns_BT = outcome_B[:, None].double() * discounts(batch.loss_mask, gamma)
    if batch.token_rewards is None:
        return returns_BT
    tokens = TrainedTokens.of(batch.loss_mask)
    decay_1 = torch.tensor([gamma], dtype=torch.float64)
    paid_BL = discounted_sums(tokens.pack(batch.token_rewards), decay_1)
    return returns_BT + tokens.unpack(paid_BL)
