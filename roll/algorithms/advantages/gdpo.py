"""Advantages from several rewards, each normalised on its own in a group (GDPO, arXiv 2601.05242).

If the sum of the rewards were normalised instead, the reward with the largest spread would dominate
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.moments import standardized
from roll.algorithms.registries import ADVANTAGES
from roll.config.algorithm.advantages import GdpoConfig


def gdpo_advantages(
    rewards_BR: Tensor, group_ids_B: Tensor, weights_BR: Tensor, *, eps: float
) -> Tensor:
    """Return the weighted sum of normalised rewards, standardized over the step, float64 `[B]`.

    The sum over rewards r is: sum of weight_r * (reward_r - group mean) / (group std + eps).

    Args:
        rewards_BR: one column per reward; its scale cancels, its sign does not.
        group_ids_B: any integers; samples of one prompt share an id.
        weights_BR: factor of each reward after its normalisation; 0 where it does not apply.
        eps: number that is added to every standard deviation.
    """
    rows, rewards = rewards_BR.shape
    _, group_B = torch.unique(group_ids_B, return_inverse=True)
    # One group per pair of prompt and reward, so that one call normalises all rewards.
    pairs_BR = group_B[:, None] * rewards + torch.arange(rewards, device=group_B.device)
    apart_BR = group_advantages(
        rewards_BR.reshape(-1), pairs_BR.reshape(-1), std="group", eps=eps
    ).view(rows, rewards)
    return standardized((apart_BR * weights_BR).sum(1), eps=eps)


@ADVANTAGES.register(GdpoConfig)
@dataclass(frozen=True)
class Gdpo(SampleEstimator):
    """GDPO advantage from `named_rewards`, the same on every trained token of a sample.

    The `weight` of a reward multiplies the normalised reward; a factor before the normalisation
    would have no effect.
    """

    config: GdpoConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample; raise ValueError without named rewards or with token
        rewards."""
        rewards_BR = samples.require("named_rewards", made_by="assemble")
        weights_BR = samples.require("reward_weights", made_by="assemble")
        if samples.token_rewards is not None:
            raise ValueError(
                "gdpo normalises each reward of a sample by itself and has no place for "
                "token_rewards; put the KL penalty into the loss, or use another advantage"
            )
        return gdpo_advantages(rewards_BR, samples.group_ids, weights_BR, eps=self.config.eps)
