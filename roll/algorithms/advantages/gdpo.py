"""Several rewards, each normalised within its group by itself (GDPO, arXiv 2601.05242).

Normalising their sum instead lets the reward with the widest spread drown the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.moments import standardized
from roll.algorithms.registries import ADVANTAGES
from roll.core.batches import RolloutBatch


def gdpo_advantages(
    rewards_BR: Tensor, group_ids_B: Tensor, weights_BR: Tensor, *, eps: float
) -> Tensor:
    """standardized over the step(sum over r of weight_r * (reward_r - group mean) / (group std +
    eps)), float64 `[B]`.

    Args:
        rewards_BR: one column per reward; its scale cancels, its sign does not.
        group_ids_B: any integers.
        weights_BR: what each reward counts after its normalisation; 0 where it does not apply.
        eps: added to every standard deviation.
    """
    rows, rewards = rewards_BR.shape
    _, group_B = torch.unique(group_ids_B, return_inverse=True)
    # A group per pair of prompt and reward, so that one call normalises all of them.
    pairs_BR = group_B[:, None] * rewards + torch.arange(rewards, device=group_B.device)
    apart_BR = group_advantages(
        rewards_BR.reshape(-1), pairs_BR.reshape(-1), std="group", eps=eps
    ).view(rows, rewards)
    return standardized((apart_BR * weights_BR).sum(1), eps=eps)


@ADVANTAGES.register("gdpo")
@dataclass(frozen=True, kw_only=True)
class Gdpo:
    """The same advantage on every trained token of a sample; sees `named_rewards`, not their sum.
    The `weight` of a reward multiplies it after its normalisation, which would undo it before."""

    eps: float = 1e-6

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no `named_rewards`, or has token rewards.
        """
        rewards_BR = batch.require("named_rewards", made_by="assemble")
        weights_BR = batch.require("reward_weights", made_by="assemble")
        if batch.token_rewards is not None:
            raise ValueError(
                "gdpo normalises each reward of a sample by itself and has no place for "
                "token_rewards; put the KL penalty into the loss, or use another advantage"
            )
        advantages_B = gdpo_advantages(rewards_BR, batch.group_ids, weights_BR, eps=self.eps)
        return Estimate(advantages_B[:, None].float() * batch.loss_mask)
