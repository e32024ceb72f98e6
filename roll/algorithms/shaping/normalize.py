"""Normalisation of rewards with a mean and a standard deviation, each over its own level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.loss_interface import Samples
from roll.algorithms.moments import NO_SPREAD, Moments
from roll.algorithms.shaping.interface import REWARD_SHAPINGS
from roll.algorithms.shaping.rewards import Rewards
from roll.algorithms.siblings import Siblings
from roll.config.algorithm.shaping import Level, NormalizeRewardConfig
from roll.core.metrics import Last, Metrics


def normalized(
    values_B: Tensor, mean_B: Tensor, std_B: Tensor, center_B: Tensor, *, eps: float
) -> Tensor:
    """Return (value - mean) / (std + eps), float64 `[B]`; not divided where there is no spread.

    Args:
        values_B: values to normalise.
        mean_B: mean that is subtracted.
        std_B: standard deviation that divides.
        center_B: mean from which `std_B` was computed; a `std_B` that is tiny compared with it is
            treated as rounding.
        eps: number that is added to the standard deviation.
    """
    divisor_B = torch.where(std_B > NO_SPREAD * center_B.abs(), std_B + eps, 1.0)
    return (values_B - mean_B) / divisor_B


@REWARD_SHAPINGS.register(NormalizeRewardConfig)
@dataclass
class NormalizeReward:
    """Normalised reward (reward - mean) / (std + eps), with the mean and the std of these levels:

        none     mean 0 (no subtraction) or no division
        group    the samples of the same prompt
        batch    all samples of the step
        running  all samples of all steps, this step included; all tags together

    Standard deviations are unbiased and refer to the mean of their own level, even if another mean
    is subtracted. The greedy baseline is normalised in the same way, but does not count in means
    and standard deviations.

    Metrics, for `running` only: `running_mean`, `running_std`.
    """

    config: NormalizeRewardConfig
    moments: Moments = field(default=Moments(), init=False)

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Normalise the rewards; call once per step, because running moments count every call."""
        config, values_B = self.config, rewards.total_B
        metrics = Metrics()
        if "running" in (config.mean, config.std):
            self.moments = self.moments.merge(Moments.of(values_B))
            metrics = Metrics(
                {
                    "running_mean": Last(self.moments.mean),
                    "running_std": Last(self.moments.std),
                }
            )
        mean_B, _ = self._moments(config.mean, values_B, batch.group_ids)
        center_B, std_B = self._moments(config.std, values_B, batch.group_ids)
        if config.std == "none":
            return rewards.map(lambda of_B: of_B - mean_B), metrics
        shaped = rewards.map(lambda of_B: normalized(of_B, mean_B, std_B, center_B, eps=config.eps))
        return shaped, metrics

    def state(self) -> dict[str, float]:
        """Return the running moments; empty if neither level is `running`."""
        return self.moments.state() if "running" in (self.config.mean, self.config.std) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the running moments; raise CheckpointError if the keys are of another state."""
        self.moments = Moments.restored(state)

    def _moments(
        self, level: Level, values_B: Tensor, group_ids_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the level for each sample, both float64 `[B]`."""
        match level:
            case "none":
                return torch.zeros_like(values_B), torch.ones_like(values_B)
            case "group":
                siblings = Siblings.of(group_ids_B)
                return siblings.mean(values_B), siblings.std(values_B)
            case "batch" | "running":
                moments = self.moments if level == "running" else Moments.of(values_B)
                mean_B = torch.full_like(values_B, moments.mean)
                return mean_B, torch.full_like(values_B, moments.std)
