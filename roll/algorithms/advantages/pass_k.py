"""Advantages for the probability that one of k samples succeeds (pass@k, arXiv 2508.10751)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import PassKConfig


def pass_k_advantages(success_B: Tensor, group_ids_B: Tensor, *, k: int) -> Tensor:
    """Return for each sample the mean advantage of the k-subsets of its group that contain it.

    The reward of a subset is 1 if any of its samples succeeds and 0 otherwise. The advantage of a
    subset is (reward - mean) / std over all k-subsets of the group. Let s of the n samples succeed
    and w = n - s fail, and let f = C(w, k) / C(n, k), the probability that a subset fails. The
    paper's equations then become

        success  sqrt(f / (1 - f))
        failure  -(s / w) sqrt(f / (1 - f))

    The advantages of a group add up to 0. For k = 1 they are those of GRPO with the biased standard
    deviation. If all subsets of a group have the same reward, or the group has fewer than k
    samples, its advantages are 0.

    Args:
        success_B: bool, True for a sample that succeeds.
        group_ids_B: any integers; samples of one prompt share an id.
        k: number of samples in a subset, at least 1.

    Returns:
        Float64 `[B]`.
    """
    siblings = Siblings.of(group_ids_B)
    wins_B = siblings.sum(success_B)
    losses_B = siblings.size_B - wins_B
    drawn_k = torch.arange(k, device=wins_B.device)
    # C(w, k) / C(n, k), factor by factor: each is the probability that one more draw fails.
    chances_Bk = (losses_B[:, None] - drawn_k).clamp(min=0) / (
        siblings.size_B[:, None] - drawn_k
    ).clamp(min=1)
    fail_B = chances_Bk.prod(1)
    success_advantage_B = (fail_B / (1 - fail_B)).sqrt().where(fail_B < 1, 0.0)
    failure_advantage_B = -wins_B / losses_B.clamp(min=1) * success_advantage_B
    return torch.where(success_B, success_advantage_B, failure_advantage_B)


@ADVANTAGES.register(PassKConfig)
@dataclass(frozen=True)
class PassK(SampleEstimator):
    """Pass@k advantage, the same on every trained token of a sample.

    A sample succeeds if its total reward (token rewards included) is above `threshold`.
    """

    config: PassKConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the pass@k advantage of each sample, float64 `[B]`; ValueError without rewards."""
        success_B = total_rewards(samples) > self.config.threshold
        return pass_k_advantages(success_B, samples.group_ids, k=self.config.k)
