"""Preference for short responses, as a reward within the group or as a weight in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.advantages.rewards import scores
from roll.algorithms.loss_interface import Samples
from roll.algorithms.shaping.interface import REWARD_SHAPINGS, SAMPLE_WEIGHTS
from roll.algorithms.shaping.rewards import Rewards
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.shaping import LengthPenaltyConfig, LengthWeightConfig
from roll.core.metrics import Mean, Metrics


def response_tokens(batch: Samples) -> Tensor:
    """Return the number of tokens that the policy generated, float64 `[B]`.

    Tokens of the prompt, of the environment and of padding do not count.
    """
    return batch.trained_tokens().double()


def episode_tokens(batch: Samples) -> Tensor:
    """Return the number of tokens of each episode, float64 `[B]`, those of its first observation
    and of the environment included; of an episode with several rows, those of the longest one."""
    return (batch.lengths if batch.row_tokens is None else batch.row_tokens).double()


def relative_length(lengths_B: Tensor, shortest_B: Tensor, longest_B: Tensor) -> Tensor:
    """Return (length - shortest) / (longest - shortest), in [0, 1]; 0.5 where all are equal."""
    range_B = longest_B - shortest_B
    share_B = (lengths_B - shortest_B) / range_B.clamp(min=1)
    return torch.where(range_B > 0, share_B, 0.5)


@REWARD_SHAPINGS.register(LengthPenaltyConfig)
@dataclass(frozen=True)
class LengthPenalty:
    """Length reward within the group of a prompt (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    With x = 0.5 - (length - shortest) / (longest - shortest), the reward changes by

        coef * x            if the sample passes
        coef * min(0, x)    if it does not

    All changes are 0 if the samples of the group have equal lengths. A sample passes if its
    unshaped reward, that of its turns included, is at least `pass_score`. The greedy baseline does
    not change, because its length is not known.

    Metrics: `mean` of the changes.
    """

    config: LengthPenaltyConfig

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the changed rewards, and metrics; ValueError without unshaped rewards in
        `batch`."""
        passed_B = scores(batch) >= self.config.pass_score
        lengths_B = response_tokens(batch)
        share_B = relative_length(lengths_B, *Siblings.of(batch.group_ids).range(lengths_B))
        short_B = 0.5 - share_B
        added_B = self.config.coef * torch.where(passed_B, short_B, short_B.clamp(max=0))
        shaped = Rewards(rewards.total_B + added_B, rewards.baseline_B)
        return shaped, Metrics({"mean": Mean(added_B.sum().item(), len(batch))})


@SAMPLE_WEIGHTS.register(LengthWeightConfig)
@dataclass(frozen=True)
class LengthWeight:
    """Weight max - (max - min) * (length - shortest) / (longest - shortest) over a step's samples.

    A response without tokens has no loss, and does not count as the shortest.
    """

    config: LengthWeightConfig

    def __call__(self, batch: Samples) -> Tensor:
        """Return the weight of each sample, float64 `[B]`."""
        lengths_B = response_tokens(batch)
        longest = lengths_B.amax()
        shortest = torch.where(lengths_B > 0, lengths_B, longest).amin()
        # An empty response is below `shortest`. Its weight has no effect, but must be in range.
        share_B = relative_length(lengths_B.clamp(min=shortest), shortest, longest)
        config = self.config
        return config.max - (config.max - config.min) * share_B
