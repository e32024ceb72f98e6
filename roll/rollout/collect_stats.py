"""Numbers on the groups that end between two steps, for the metrics of a step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.core.metrics import Metrics, Sum
from roll.rollout.types import GroupTiming


@dataclass(frozen=True, slots=True)
class CollectStats:
    """Numbers on the groups between the end of the previous `collect` and the end of this one."""

    begun: int
    """Number of groups that started."""
    rejected: dict[str, int]
    """Number of groups that a filter rejected, for each reason."""
    rejected_by_tag: dict[str, int]
    """The same for each tag that has any."""
    aborted: int
    """Number of groups stopped while they ran, because they would have been too old."""
    surplus: int
    """Number of accepted groups that became too old before a step needed them."""
    generated_tokens: int
    """Number of response tokens of all groups that ended, used or not."""
    elapsed_s: float
    generate_s: float
    """Time in which at least one of the ended groups was being generated, in seconds."""
    reward_s: float
    """Time in which at least one of the ended groups was being scored, in seconds; may overlap with
    `generate_s`."""

    @property
    def num_rejected(self) -> int:
        """Number of rejected groups, over all reasons."""
        return sum(self.rejected.values())

    def metrics(self) -> Metrics:
        """Return the counts as `rollout/...` metrics, without durations, which the caller times."""
        return Metrics(
            {
                "rollout/started_groups": Sum(self.begun),
                "rollout/rejected_groups": Sum(self.num_rejected),
                "rollout/aborted_groups": Sum(self.aborted + self.surplus),
                "rollout/generated_tokens": Sum(self.generated_tokens),
            }
        )

    def tag_metrics(self, tags: Iterable[str]) -> Metrics:
        """Return `tag/<tag>/rejected_groups` for each of these tags."""
        found = self.rejected_by_tag
        return Metrics({f"tag/{t}/rejected_groups": Sum(found.get(t, 0)) for t in tags})


@dataclass
class CollectCounts:
    """Counts from which `CollectStats` is computed."""

    since_s: float
    """Start of the counting, on the clock of the event loop, in seconds."""
    begun: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    rejected_by_tag: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[GroupTiming | None, int]] = field(default_factory=list)
    """Times and number of response tokens of each group that ended without an error, accepted or
    rejected. The groups themselves would keep tokens in memory that nobody needs any more."""

    def stats(self, aborted: int, surplus: int) -> CollectStats:
        """Compute counts and times since the last `collect`, up to now on the event loop's clock.

        Args:
            aborted: number of groups that became too old while they ran.
            surplus: number of accepted groups that became too old.
        """
        now_s = asyncio.get_running_loop().time()
        times = [timing for timing, _ in self.ended if timing is not None]
        return CollectStats(
            begun=self.begun,
            rejected=dict(self.rejected),
            rejected_by_tag=dict(self.rejected_by_tag),
            aborted=aborted,
            surplus=surplus,
            generated_tokens=sum(tokens for _, tokens in self.ended),
            elapsed_s=now_s - self.since_s,
            generate_s=_covered_s([(t.started_s, t.generated_s) for t in times], self.since_s),
            reward_s=_covered_s([(t.generated_s, t.scored_s) for t in times], self.since_s),
        )


def _covered_s(spans: Sequence[tuple[float, float]], since_s: float) -> float:
    """Return the length of the union of `spans`, counted from `since_s` on, in seconds."""
    covered, end = 0.0, since_s
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered
