"""Types for rewards that users write, as a function or as a subclass of `RewardWorker`
(roll.workers.reward)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from roll.core.pickling import pickle_by_fields


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Reward:
    """Result of a reward for one sample."""

    score: float
    """Any finite number."""
    parts: dict[str, float] = field(default_factory=dict)
    """Details by name, logged as `reward/<name>/<part>`."""
    steps: Sequence[tuple[int, float]] = ()
    """Rewards of the steps of the response, beside the score: pairs of the place where a step ends
    and its reward, in order. Only for rewards with `process: true`."""
    steps_in: Literal["characters", "tokens"] = "characters"
    """Unit of the places: characters of `response_text`, or tokens of the response. A step that
    ends after 5 has the characters, or tokens, 0 to 4."""
    token_rewards: Sequence[float] | None = None
    """Reward of each token of the response, in place of `steps`."""


@dataclass(frozen=True, slots=True)
class RewardContext:
    """Information that a reward gets in addition to the sample."""

    name: str
    """Name of the reward in the config."""
    seed: int
    """Seed for a reward that uses random numbers."""
