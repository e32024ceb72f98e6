"""Interfaces and registries of the parts of shaping.

A part is registered for its config class. Every part gets the samples of a whole step as they were
assembled: `batch.rewards` are the unshaped rewards, and `batch.trained_tokens()` counts all tokens
that the policy generated, even if other parts have changed rewards or mask. The tokens themselves
may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from roll.algorithms.loss_interface import Samples
from roll.algorithms.own.shaping import (
    OwnAdvantageShaping,
    OwnMask,
    OwnSampleWeight,
    own_reward_shaping,
)
from roll.algorithms.registries import PartRegistry
from roll.algorithms.shaping.rewards import Rewards
from roll.core.metrics import Metrics


class RewardShaping(Protocol):
    """Function that changes rewards; `rewards` are the results of the shapings before it."""

    def __call__(self, rewards: Rewards, batch: Samples) -> tuple[Rewards, Metrics]:
        """Return the changed rewards of a step, and metrics; call once per step. ValueError if
        `batch` lacks what it needs."""
        ...


class SampleMask(Protocol):
    """Function that selects the samples to train on, as bool `[B]`."""

    def __call__(self, batch: Samples) -> Tensor:
        """Return which samples of a step are trained on, bool `[B]`; ValueError if `batch` lacks
        what it needs."""
        ...


class SampleWeight(Protocol):
    """Function that computes relative weights of the samples, float64 `[B]`, above zero."""

    def __call__(self, batch: Samples) -> Tensor:
        """Return the weight of each sample of a step, float64 `[B]`; ValueError if `batch` lacks
        what it needs."""
        ...


class AdvantageShaping(Protocol):
    """Function that changes advantages, float32 `[B, T]`.

    It uses only advantages inside the mask, and the result is zero outside.
    """

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]:
        """Return the changed advantages of a step, 0 outside the mask, and metrics."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Part with a state that is kept between steps and saved in the checkpoint."""

    def state(self) -> dict[str, float]:
        """Return the state as plain JSON; empty if the options need no state."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; raise CheckpointError if it is of another part."""
        ...


REWARD_SHAPINGS: PartRegistry[RewardShaping] = PartRegistry("reward shaping", own_reward_shaping)
MASKS: PartRegistry[SampleMask] = PartRegistry("mask", OwnMask)
SAMPLE_WEIGHTS: PartRegistry[SampleWeight] = PartRegistry("sample weight", OwnSampleWeight)
ADVANTAGE_SHAPINGS: PartRegistry[AdvantageShaping] = PartRegistry(
    "advantage shaping", OwnAdvantageShaping
)
