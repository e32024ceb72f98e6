"""What passes between generation, reward, scheduling and assembly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.core.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample and the verdict of its rewards.

    Example: ScoredSample(sample, reward=1.1, parts={"math/formatted": 1.0}, by_name={"math": 1.1})
    """

    sample: Sample
    reward: float
    """Weighted total; finite. Means nothing where a reward failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Details, named `<reward>/<part>`; logged as `reward/<reward>/<part>`."""
    by_name: dict[str, float] = field(default_factory=dict)
    """Score of each reward before its weight; without those that failed."""
    failed: tuple[str, ...] = ()
    """Rewards that gave no verdict. Such a sample has no reward: it is not trained on, and nothing
    is compared with it."""

    @property
    def has_reward(self) -> bool:
        return not self.failed


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One try at one prompt."""

    prompt: Prompt
    step: int
    repeat: int = 0
    """How often this step has tried the prompt before (a small data set wraps around)."""

    @property
    def group_id(self) -> str:
        """`<step>/<prompt>`, with `+<repeat>` on a repeat; unique in a run."""
        again = f"+{self.repeat}" if self.repeat else ""
        return f"{self.step}/{self.prompt.id}{again}"


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Moments of one group on the clock of `time.perf_counter`, in seconds."""

    started_s: float
    generated_s: float
    scored_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """The scored siblings of one prompt."""

    prompt: Prompt
    samples: tuple[ScoredSample, ...]
    """In sibling order."""
    step: int
    timing: GroupTiming | None = None
    baseline: ScoredSample | None = None
    """A greedy response to the same prompt, which is not trained on."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the samples that have one, in sibling order."""
        return tuple(scored.reward for scored in self.samples if scored.has_reward)

    @property
    def equal_rewards(self) -> bool:
        """True where no sibling did better than another, as far as they have rewards."""
        return len(set(self.rewards)) <= 1

    @property
    def num_response_tokens(self) -> int:
        return sum(scored.sample.num_response_tokens for scored in self.samples)


RunGroup = Callable[[GroupTask], Coroutine[Any, Any, Group]]
"""Generates and scores one group; must not leave anything running when it is cancelled."""

Score = Callable[[list[Sample]], Awaitable[Sequence[ScoredSample]]]
"""Scores the siblings of one prompt, in their order; routing by tag is the caller's."""

GroupFilter = Callable[[Group], str | None]
"""Why a group is rejected, in a few words, or None to keep it."""
