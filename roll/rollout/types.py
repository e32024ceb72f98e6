"""Types that generation, rewards, scheduling and batch assembly exchange."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.core.pickling import pickle_by_fields
from roll.core.step_rewards import StepRewards
from roll.core.types import Prompt, Sample, Turn


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample and the scores that its rewards gave it.

    Example: ScoredSample(sample, reward=1.1, parts={"math/formatted": 1.0}, by_name={"math": 1.1})
    """

    sample: Sample
    """Response and its prompt."""
    reward: float
    """Weighted sum of the scores, finite; has no meaning if a reward failed."""
    parts: dict[str, float] = field(default_factory=dict)
    """Details with names `<reward>/<part>`, logged as `reward/<reward>/<part>`."""
    by_name: dict[str, float] = field(default_factory=dict)
    """Score of each reward before its weight, without the rewards that failed."""
    failed: tuple[str, ...] = ()
    """Names of the rewards that gave no score. If there are any, the sample has no reward: it is
    neither trained on nor compared with its siblings."""
    turns: tuple[Turn, ...] = ()
    """Turns of the policy, if the sample is an episode, in the order in which they were written, in
    all of its rows."""
    branches: tuple[Sample, ...] = ()
    """Further rows of the episode, each with a prompt of its own; they share the reward."""
    seat: int = 0
    """Player of an episode of several players; samples are compared with those of the same
    player."""
    shared_tokens: int = 0
    """Number of its tokens of the policy that were written for another sample of the group, off
    which it branches."""
    steps: StepRewards | None = None
    """Weighted sum of the rewards of single steps or tokens, beside `reward`; None if there are
    none."""
    turn_reward: float = 0.0
    """Part of `steps` that an environment gave for turns (`credit: turns`), and that is as much the
    outcome of the sample as `reward` is."""

    @property
    def rows(self) -> tuple[Sample, ...]:
        """All rows of the sample: itself, and its branches."""
        return (self.sample, *self.branches)

    @property
    def has_reward(self) -> bool:
        """True if no reward failed on the sample; only then `reward` has a meaning."""
        return not self.failed

    @property
    def score(self) -> float:
        """Reward of the whole sample, as validation, filters and the curriculum see it. Process
        rewards are no part of it."""
        return self.reward + self.turn_reward

    @property
    def total(self) -> float:
        """Reward of the whole sample and of its steps together."""
        return self.reward + (0.0 if self.steps is None else self.steps.total)


@dataclass(frozen=True, slots=True)
class GroupTask:
    """Order to generate and score one group for one prompt."""

    prompt: Prompt
    step: int
    """Step whose weights are current when the group starts."""
    repeat: int = 0
    """Number of groups that this prompt already had in this step. More than 0 only if a small data
    set starts again from its beginning within a step."""

    @property
    def group_id(self) -> str:
        """Name `<step>/<prompt id>`, with `+<repeat>` if `repeat` is not 0; unique in a run."""
        again = f"+{self.repeat}" if self.repeat else ""
        return f"{self.step}/{self.prompt.id}{again}"


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Times of one group on the clock of its event loop, in seconds."""

    started_s: float
    generated_s: float
    """Time at which the last request of the group returned."""
    scored_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """The scored siblings of one prompt."""

    prompt: Prompt
    """Prompt of all samples."""
    samples: tuple[ScoredSample, ...]
    """Siblings, in the order of their indices."""
    step: int
    """Step whose weights were current when the group started."""
    timing: GroupTiming | None = None
    """Times of the group; None if it was not generated in this run."""
    baseline: ScoredSample | None = None
    """Greedy response to the same prompt; not trained on."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Scores of the samples that have a reward, in sibling order."""
        return tuple(scored.score for scored in self.samples if scored.has_reward)

    @property
    def equal_rewards(self) -> bool:
        """True if all rewards of the group are equal (those of each player, if there are several)
        and those of single steps 0, or if there are none."""
        if any(any(one.steps.values) for one in self.samples if one.has_reward and one.steps):
            return False
        kinds = {(one.seat, one.reward) for one in self.samples if one.has_reward}
        return len(kinds) == len({seat for seat, _ in kinds})

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy wrote, over all samples; each counts once."""
        held = sum(row.num_sampled_tokens for one in self.samples for row in one.rows)
        return held - sum(one.shared_tokens for one in self.samples)


RunGroup = Callable[[GroupTask], Coroutine[Any, Any, Group]]
"""Function that generates and scores one group; leaves nothing running if it is cancelled."""

Score = Callable[[list[Sample]], Awaitable[Sequence[ScoredSample]]]
"""Function that scores samples of one prompt and returns the results in the same order. It also
selects the rewards by the tag of the samples."""

ScoreGroup = Callable[[Sequence[ScoredSample]], Awaitable[list[ScoredSample]]]
"""Function that adds the rewards that see all samples of a group; returns the samples in order."""

GroupFilter = Callable[[Group], str | None]
"""Function that returns a short reason to reject a group, or None to keep the group."""
