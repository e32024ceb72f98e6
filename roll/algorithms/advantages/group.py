"""Advantages relative to the other samples of the same prompt: GRPO, Dr.GRPO and RLOO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.loss_interface import SampleEstimator, Samples
from roll.algorithms.moments import Moments
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import GrpoConfig, RlooConfig

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
    """Return (reward - baseline of its group) / (std + eps), float64 `[B]`.

    Standard deviations are unbiased (n - 1) and always include the sample itself. `std` selects the
    rewards of the group (`group`), all rewards of the step (`batch`), or no division (`none`;
    Dr.GRPO, arXiv 2503.20783). A sample that is alone in its group has advantage 0.

    Args:
        rewards_B: any float dtype; computed in float64, so that equal rewards give exactly 0.
        group_ids_B: any integers; samples of one prompt share an id and need not be adjacent.
        std: rewards whose standard deviation divides the centred reward.
        eps: number that is added to the standard deviation.
        baseline: mean of the group including the sample (`mean`), or of the other samples
            (`leave_one_out`), from which a reward differs n / (n - 1) times as much.
    """
    rewards_B = rewards_B.double()
    siblings = Siblings.of(group_ids_B)
    centred_B = rewards_B - siblings.mean(rewards_B)
    if baseline == "leave_one_out":
        # Only the mean leaves the sample out, not the standard deviation. Otherwise the only
        # success of a group would have peers without spread, not be divided, and so count less.
        centred_B = centred_B * siblings.size_B / (siblings.size_B - 1).clamp(min=1)
    match std:
        case "group":
            return centred_B / (siblings.std(rewards_B) + eps)
        case "batch":
            return centred_B / (Moments.of(rewards_B).std + eps)
        case "none":
            return centred_B


@ADVANTAGES.register(GrpoConfig)
@dataclass(frozen=True)
class Grpo(SampleEstimator):
    """GRPO advantage (arXiv 2402.03300), the same on every trained token of a sample.

    With `std="none"` it is the advantage of Dr.GRPO (arXiv 2503.20783). Token rewards are added to
    the reward of the sample.
    """

    config: GrpoConfig

    def per_sample(self, samples: Samples) -> Tensor:
        config = self.config
        return group_advantages(
            total_rewards(samples),
            samples.group_ids,
            std=config.std,
            eps=config.eps,
            baseline=config.baseline,
        )


@ADVANTAGES.register(RlooConfig)
@dataclass(frozen=True)
class Rloo(SampleEstimator):
    """Advantage reward - mean reward of the prompt's OTHER samples (RLOO, arXiv 2402.14740)."""

    config: RlooConfig

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the advantage of each sample, 0 in a group of one."""
        return Grpo(GrpoConfig(baseline="leave_one_out", std="none")).per_sample(samples)
