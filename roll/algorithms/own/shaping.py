"""Bases of the shaping that users bring, and the calls of their code; `roll.extend` exports the
bases.

A part that keeps something between steps has it in a private attribute (`_seen: float =
PrivateAttr(0.0)`), and `state` and `load`, which a checkpoint asks; see
`roll.algorithms.shaping.interface.Stateful`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from roll.algorithms.loss_interface import Samples
from roll.algorithms.own.calls import OwnTensors, of_step
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm.shaping import (
    OwnAdvantageShapingConfig,
    OwnMaskConfig,
    OwnRewardShapingConfig,
    OwnSampleWeightConfig,
)
from roll.config.user_code.own import OwnPart
from roll.core.metrics import Metrics


class RewardShaping(OwnRewardShapingConfig, ABC):
    """Change of the total rewards of a step."""

    @abstractmethod
    def __call__(self, rewards: Rewards, samples: Samples) -> tuple[Rewards, Metrics]:
        """Return the changed rewards, and metrics (`Metrics()` for none). Called once per step.

        Args:
            rewards: `rewards.total_B`, float64 `[B]`, after the shapings before this one; and
                `rewards.baseline_B`, those of greedy responses, or None. `rewards.map` applies a
                function to both.
            samples: samples of the step as they were rewarded: `samples.rewards` are unshaped,
                and with `credit: turns` 0 but for `samples.turn_rewards`.
        """


class SampleMask(OwnMaskConfig, ABC):
    """Rule that excludes samples from training; they still count in the statistics of others."""

    @abstractmethod
    def __call__(self, samples: Samples) -> Tensor:
        """Return which samples are trained on, bool `[B]`."""


class SampleWeight(OwnSampleWeightConfig, ABC):
    """Weight of samples in the loss; only the ratios of weights matter."""

    @abstractmethod
    def __call__(self, samples: Samples) -> Tensor:
        """Return the weight of each sample, float `[B]`, above zero."""


class AdvantageShaping(OwnAdvantageShapingConfig, ABC):
    """Change of the advantages of a step."""

    @abstractmethod
    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        """Return the changed advantages, float `[B, T]`, and metrics (`Metrics()` for none).

        Args:
            advantages_BT: advantages of the step, float32, 0 where `mask_BT` is False.
            mask_BT: True at the tokens that are trained, bool.
        """


@dataclass(frozen=True)
class _Own:
    """A part of the user, and its key in the run file."""

    config: Any
    key: str

    @property
    def code(self) -> OwnTensors:
        """The calls of the part's code."""
        return OwnTensors(self.config, self.key)

    def pair(self, found: Any, what: str) -> tuple[Any, Metrics]:
        """Return the two values that the part returned; RollError if these are not `what` and
        Metrics."""
        kept = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Metrics)
        self.code.require(kept, f"{found!r:.60}", f"a pair of {what} and Metrics")
        return found[0], found[1]


@dataclass(frozen=True)
class OwnRewardShaping(_Own):
    """Reward shaping of the user."""

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the rewards of the user's code, float64; RollError if it fails."""
        code, size = self.code, [len(batch)]
        found = code.call(self.config, of_step(batch.sample_ids), rewards, batch)
        shaped, metrics = self.pair(found, "Rewards")
        code.require(isinstance(shaped, Rewards), type(shaped).__name__, "Rewards")
        total_B = code.numbers(shaped.total_B, size).double()
        if rewards.baseline_B is None:
            return Rewards(total_B), metrics
        known_B = ~rewards.baseline_B.isnan()
        return Rewards(total_B, code.numbers(shaped.baseline_B, size, known_B).double()), metrics


@dataclass(frozen=True)
class OwnStatefulShaping(OwnRewardShaping):
    """Reward shaping of the user that keeps something between steps."""

    def state(self) -> dict[str, float]:
        """Return the state of the user's code, plain JSON; RollError if it fails."""
        found: dict[str, float] = self.code.call(self.config.state, "")
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; RollError if the user's code fails."""
        self.code.call(self.config.load, "", state)


@dataclass(frozen=True)
class OwnMask(_Own):
    """Mask of the user."""

    def __call__(self, batch: Samples) -> Tensor:
        """Return the samples that are trained on, bool `[B]`; RollError if the user's code
        fails."""
        found = self.code.call(self.config, of_step(batch.sample_ids), batch)
        kept = isinstance(found, Tensor) and found.dtype == torch.bool
        kept = kept and list(found.shape) == [len(batch)]
        self.code.require(kept, f"{found!r:.80}", f"a bool tensor of shape [{len(batch)}]")
        return cast(Tensor, found)


@dataclass(frozen=True)
class OwnSampleWeight(_Own):
    """Weight of the user."""

    def __call__(self, batch: Samples) -> Tensor:
        """Return the weight of each sample, float64 `[B]`; RollError if the user's code fails."""
        found = self.code.call(self.config, of_step(batch.sample_ids), batch)
        weights_B = self.code.numbers(found, [len(batch)]).double()
        low = weights_B.min().item()
        self.code.require(low > 0, f"a weight of {low:g}", "weights above zero")
        return weights_B


@dataclass(frozen=True)
class OwnAdvantageShaping(_Own):
    """Advantage shaping of the user."""

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        """Return the advantages of the user's code, float32, 0 outside the mask; RollError if it
        fails."""
        found, metrics = self.pair(
            self.code.call(self.config, "", advantages_BT, mask_BT), "a tensor"
        )
        shaped_BT = self.code.numbers(found, mask_BT.shape, mask_BT).float()
        return shaped_BT.masked_fill(~mask_BT, 0), metrics


def own_reward_shaping(part: OwnPart, key: str) -> OwnRewardShaping:
    """Return the reward shaping that the user brought, with checks around it."""
    keeps = hasattr(part, "state") and hasattr(part, "load")
    return (OwnStatefulShaping if keeps else OwnRewardShaping)(part, key)
