"""Advantages for the chance that one of k samples succeeds (pass@k training, arXiv 2508.10751)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.core.batches import RolloutBatch


def pass_k_advantages(success_B: Tensor, group_ids_B: Tensor, *, k: int) -> Tensor:
    """Mean over all k-subsets of a group that hold the sample of the subset's advantage, `[B]`.

    A subset earns 1 if any of its samples succeeds, and its advantage is (reward - mean) / std over
    all k-subsets of the group. With n samples, of which s succeed and w = n - s do not, and with
    f = C(w, k) / C(n, k), the chance that a subset fails, the paper's equations become

        success  sqrt(f / (1 - f))
        failure  -(s / w) sqrt(f / (1 - f))

    They add up to 0, and k = 1 is GRPO with the biased standard deviation. Where all subsets earn
    the same there is nothing to compare: all 0. So it is where a group is smaller than k.

    Args:
        success_B: bool.
        group_ids_B: any integers.
        k: at least 1.

    Returns:
        Float64 `[B]`.
    """
    siblings = Siblings.of(group_ids_B)
    wins_B = siblings.sum(success_B)
    losses_B = siblings.size_B - wins_B
    drawn_k = torch.arange(k, device=wins_B.device)
    # C(w, k) / C(n, k) factor by factor: the chance that the next draw fails as well.
    chances_Bk = (losses_B[:, None] - drawn_k).clamp(min=0) / (
        siblings.size_B[:, None] - drawn_k
    ).clamp(min=1)
    fail_B = chances_Bk.prod(1)
    success_advantage_B = (fail_B / (1 - fail_B)).sqrt().where(fail_B < 1, 0.0)
    failure_advantage_B = -wins_B / losses_B.clamp(min=1) * success_advantage_B
    return torch.where(success_B, success_advantage_B, failure_advantage_B)


@ADVANTAGES.register("pass_k")
@dataclass(frozen=True, kw_only=True)
class PassK:
    """The same advantage on every trained token of a sample. A total reward (token rewards
    included) above `threshold` is a success."""

    k: int
    threshold: float = 0.5

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        success_B = total_rewards(batch) > self.threshold
        advantages_B = pass_k_advantages(success_B, batch.group_ids, k=self.k)
        return Estimate(advantages_B[:, None].float() * batch.loss_mask)
