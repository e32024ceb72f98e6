"""Sums of a sample's rewards: one per sample (`rewards`), and one per token (`token_rewards`)."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums, discounts
from roll.algorithms.advantages.trained import TrainedTokens
from roll.algorithms.loss_interface import Samples
from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable


def total_rewards(batch: Samples) -> Tensor:
    """Return each sample's reward plus the rewards of its trained tokens, float64 `[B]`.

    This is for estimators that use one reward per sample.

    Raises:
        ValueError: the batch has no rewards.
    """
    rewards_B = batch.require("rewards", made_by="assemble").double()
    if isinstance(batch, SampleTable) or batch.token_rewards is None:
        return rewards_B
    return rewards_B + batch.token_rewards.double().masked_fill(~batch.loss_mask, 0).sum(1)


def scores(batch: Samples) -> Tensor:
    """Return the outcome of each sample, float32 `[B]`: its reward, and what an environment gave
    for its turns. Process rewards and penalties of tokens are no part of it.

    Raises:
        ValueError: the batch has no rewards.
    """
    rewards_B = batch.require("rewards", made_by="assemble")
    return rewards_B if batch.turn_rewards is None else rewards_B + batch.turn_rewards


def rewards_to_go(outcome_B: Tensor, batch: RolloutBatch, *, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each trained token on, float64 `[B, T]`:

        sum over trained tokens j >= t of gamma ** (trained tokens after t, up to j) * reward_j

    reward_j is the token reward of j, plus `outcome_B` if j is the last trained token of the row.
    The result is zero outside the loss mask.

    Args:
        outcome_B: rewards of the samples, minus the baseline if there is one.
        batch: batch whose loss mask and token rewards are used.
    """
    returns_BT = outcome_B[:, None].double() * discounts(batch.loss_mask, gamma)
    if batch.token_rewards is None:
        return returns_BT
    tokens = TrainedTokens.of(batch.loss_mask)
    decay_1 = torch.tensor([gamma], dtype=torch.float64)
    paid_BL = discounted_sums(tokens.pack(batch.token_rewards), decay_1)
    return returns_BT + tokens.unpack(paid_BL)
