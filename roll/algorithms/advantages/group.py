"""Advantages measured against the siblings of one prompt: GRPO, Dr.GRPO and RLOO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.moments import Moments
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.core.batches import RolloutBatch

StdKind = Literal["group", "batch", "none"]
BaselineKind = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards_B: Tensor,
    group_ids_B: Tensor,
    *,
    std: StdKind,
    eps: float,
    baseline: BaselineKind = "mean",
) -> Tensor:
    """(reward - baseline of its group) / (std + eps), float64 `[B]`.

    Standard deviations are unbiased (n - 1) and always take in the sample itself: of the group's
    rewards, or of all rewards of the step (`batch`); `none` divides by nothing (Dr.GRPO,
    arXiv 2503.20783). A group of one has nothing to be compared with: its advantage is 0.

    Args:
        rewards_B: any float dtype; computed in float64, so that equal rewards give exactly 0.
        group_ids_B: any integers; siblings need not be neighbours.
        std: what the centred reward is divided by.
        eps: added to the standard deviation.
        baseline: the group's mean with the sample itself, or the mean of the others, which is
            n / (n - 1) times as far away.
    """
    rewards_B = rewards_B.double()
    siblings = Siblings.of(group_ids_B)
    centred_B = rewards_B - siblings.mean(rewards_B)
    if baseline == "leave_one_out":
        # The mean alone leaves the sample out. In a spread without it, the only success of a group
        # would see equal peers, not be divided at all and count less than any other.
        centred_B = centred_B * siblings.size_B / (siblings.size_B - 1).clamp(min=1)
    match std:
        case "group":
            return centred_B / (siblings.std(rewards_B) + eps)
        case "batch":
            return centred_B / (Moments.of(rewards_B).std + eps)
        case "none":
            return centred_B


@ADVANTAGES.register("grpo")
@dataclass(frozen=True, kw_only=True)
class Grpo:
    """The same advantage on every trained token of a sample (GRPO, arXiv 2402.03300); with
    `std="none"` it is Dr.GRPO's (arXiv 2503.20783). Token rewards count as part of the reward."""

    baseline: BaselineKind = "mean"
    std: StdKind = "group"
    eps: float = 1e-6

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; `batch` is the whole step.

        Raises:
            ValueError: the batch has no rewards.
        """
        advantages_B = group_advantages(
            total_rewards(batch),
            batch.group_ids,
            std=self.std,
            eps=self.eps,
            baseline=self.baseline,
        )
        return Estimate(advantages_B[:, None].float() * batch.loss_mask)


@ADVANTAGES.register("rloo")
@dataclass(frozen=True, kw_only=True)
class Rloo:
    """reward - mean reward of the OTHER samples of its prompt (RLOO, arXiv 2402.14740)."""

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Float32 `[B, T]`, zero outside the loss mask; a group of one has advantage 0.

        Raises:
            ValueError: the batch has no rewards.
        """
        return Grpo(baseline="leave_one_out", std="none")(batch)
