"""Advantages relative to the other samples of the same prompt: GRPO, Dr.GRPO and RLOO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from roll.algorithms.advantages.discounting import discounted_sums
from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.advantages.trained import TrainedTokens
from roll.algorithms.loss_interface import Estimate, SampleEstimator, Samples
from roll.algorithms.moments import Moments
from roll.algorithms.registries import ADVANTAGES
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.advantages import GrpoConfig, RlooConfig
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


def step_advantages(
    rewards_BL: Tensor,
    ends_BL: Tensor,
    group_ids_B: Tensor,
    *,
    std: StdKind,
    eps: float,
    baseline: BaselineKind = "mean",
) -> Tensor:
    """Return for each token the sum of the normalised rewards of the steps that end at or after it,
    float64 `[B, L]` (process supervision of GRPO, arXiv 2402.03300, section 4.1.3).

    A reward is normalised to (reward - mean) / (std + eps), with mean and unbiased std over the
    steps of all samples of the prompt.

    Args:
        rewards_BL: reward of each step at the token with which it ends, float64.
        ends_BL: True at these tokens; a reward of 0 counts too.
        group_ids_B: any integers; samples of one prompt share an id.
        std: steps whose standard deviation divides: those of the prompt (`group`), of all prompts
            (`batch`), or no division (`none`).
        eps: number that is added to the standard deviation.
        baseline: mean over the steps of the prompt (`mean`), or of its other samples
            (`leave_one_out`; the sample's own steps if no other has any).
    """
    siblings, ends = Siblings.of(group_ids_B), ends_BL.double()
    counts_B, sums_B = ends.sum(1), (rewards_BL * ends).sum(1)
    size_B, total_B = siblings.sum(counts_B), siblings.sum(sums_B)
    mean_B = total_B / size_B.clamp(min=1)
    centre_B = mean_B
    if baseline == "leave_one_out":
        others_B = size_B - counts_B
        centre_B = torch.where(others_B > 0, (total_B - sums_B) / others_B.clamp(min=1), mean_B)
    centred_BL = (rewards_BL - centre_B[:, None]) * ends
    match std:
        case "group":
            gaps_B = ((rewards_BL - mean_B[:, None]).square() * ends).sum(1)
            std_B = (siblings.sum(gaps_B) / (size_B - 1).clamp(min=1)).sqrt()
            centred_BL = centred_BL / (std_B + eps)[:, None]
        case "batch":
            centred_BL = centred_BL / (Moments.of(rewards_BL, ends_BL).std + eps)
    return discounted_sums(centred_BL, torch.ones(1, dtype=torch.float64))


@ADVANTAGES.register(GrpoConfig)
@dataclass(frozen=True)
class Grpo(SampleEstimator):
    """GRPO advantage (arXiv 2402.03300), the same on every trained token of a sample.

    With `std="none"` it is the advantage of Dr.GRPO (arXiv 2503.20783). Token rewards are added to
    the reward of the sample; but rewards of steps, with `process="steps"`, give each token an
    advantage of its own in addition, see `step_advantages`.
    """

    config: GrpoConfig

    def __call__(self, batch: RolloutBatch) -> Estimate:
        """Compute the advantages of all tokens; raise ValueError if rewards are missing."""
        config, rewards_BT, ends_BT = self.config, batch.step_rewards, batch.step_ends
        if config.process == "total" or rewards_BT is None or ends_BT is None:
            return super().__call__(batch)
        others_BT = batch.require("token_rewards", made_by="dense") - rewards_BT
        outcome_B = self.per_sample(replace(batch, token_rewards=others_BT))
        tokens = TrainedTokens.of(batch.loss_mask)
        steps_BL = step_advantages(
            tokens.pack(rewards_BT),
            tokens.pack(ends_BT.float()) > 0,
            batch.group_ids,
            std=config.std,
            eps=config.eps,
            baseline=config.baseline,
        )
        advantages_BT = outcome_B[:, None] * batch.loss_mask + tokens.unpack(steps_BL)
        return Estimate(advantages_BT.float())

    def per_sample(self, samples: Samples) -> Tensor:
        """Return the group-relative advantage of each sample's total reward, float64 `[B]`;
        ValueError without rewards."""
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
