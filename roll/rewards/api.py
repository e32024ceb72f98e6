"""What users write: a reward function, or a `RewardWorker` subclass (roll.workers.reward)."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

from roll.core.types import Sample


@dataclass(frozen=True, slots=True)
class Reward:
    """The verdict on one sample."""

    score: float
    """Any finite number."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named details, logged as `reward/<name>/<part>`."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward is told besides the sample."""

    name: str
    """Of the reward in the config."""
    seed: int


class RewardFn(Protocol):
    """A reward function: `def fn(sample, **kwargs) -> Reward | float | bool`, plain or async.

    It may also take a second positional parameter named `ctx` (a `RewardContext`).
    """

    def __call__(self, sample: Sample) -> Reward | float | Awaitable[Reward | float]: ...
