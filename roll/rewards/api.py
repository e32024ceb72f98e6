"""What users write: a reward function, or a `RewardWorker` subclass (roll.workers.reward)."""

from __future__ import annotations

from dataclasses import dataclass, field


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
