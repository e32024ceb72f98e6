"""Types for rewards that users write, as a function or as a subclass of `RewardWorker`
(roll.workers.reward)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reward:
    """Result of a reward for one sample."""

    score: float
    """Any finite number."""
    parts: dict[str, float] = field(default_factory=dict)
    """Details by name, logged as `reward/<name>/<part>`."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """Information that a reward gets in addition to the sample."""

    name: str
    """Name of the reward in the config."""
    seed: int
    """Seed for a reward that uses random numbers."""
