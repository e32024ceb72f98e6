"""What the parts of shaping have in common; each registry is keyed by the `kind` of its config.

All of them see the batch of a whole step, as it was assembled: `batch.rewards` is what the reward
functions paid and `batch.loss_mask` all that the policy wrote, whatever other parts make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from roll.core.registry import Registry


@dataclass(frozen=True, slots=True)
class Rewards:
    """The total rewards of a step on their way through the list of shapings."""

    total_B: Tensor
    """Float64."""
    baseline_B: Tensor | None = None
    """Float64; rewards of greedy responses to the same prompts. They are compared with the totals,
    so what does not depend on the response itself happens to both."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Rewards:
        """The same change to both."""
        baseline_B = None if self.baseline_B is None else change(self.baseline_B)
        return Rewards(change(self.total_B), baseline_B)


class RewardShaping(Protocol):
    """A change of the rewards; `rewards` is what the shapings before it have made of them."""

    def __call__(self, rewards: Rewards, batch: RolloutBatch) -> tuple[Rewards, Metrics]: ...


class SampleMask(Protocol):
    """Which samples are trained on: bool `[B]`."""

    def __call__(self, batch: RolloutBatch) -> Tensor: ...


class SampleWeight(Protocol):
    """How much samples count, compared with each other: float64 `[B]`, above zero."""

    def __call__(self, batch: RolloutBatch) -> Tensor: ...


class AdvantageShaping(Protocol):
    """A change of float32 advantages `[B, T]`; it reads those inside the mask alone, and gives zero
    outside of it."""

    def __call__(self, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Metrics]: ...


@runtime_checkable
class Stateful(Protocol):
    """A part that remembers something between steps; it belongs into the checkpoint."""

    def state(self) -> dict[str, float]:
        """Plain JSON; empty where the options leave nothing to remember."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        ...


REWARD_SHAPINGS: Registry[Callable[..., RewardShaping]] = Registry("reward shaping")
MASKS: Registry[Callable[..., SampleMask]] = Registry("mask")
SAMPLE_WEIGHTS: Registry[Callable[..., SampleWeight]] = Registry("sample weight")
ADVANTAGE_SHAPINGS: Registry[Callable[..., AdvantageShaping]] = Registry("advantage shaping")
