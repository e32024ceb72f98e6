"""What one reward did with the samples of one purpose: its budget of failures, and its metrics.

Training and validation have a book each: with generation ahead of training both are under way at
once, and the failures of one are no matter of the other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum

from roll.config.sections.reward import RewardConfig
from roll.core.errors import RewardError
from roll.core.metrics import Mean, Metric, Metrics
from roll.core.types import Sample
from roll.rewards.api import Reward

log = logging.getLogger(__name__)


class Purpose(StrEnum):
    """What samples are scored for."""

    TRAINING = "training"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Scored:
    """The verdict on one sample, and whether it is the reward's own."""

    reward: Reward | None
    """None: the reward failed, and `on_error` names no score; the sample is left out."""
    failure: str | None = None
    """One line: why the reward has no verdict of its own."""
    timed_out: bool = False


@dataclass(slots=True)
class ErrorBudget:
    """Failures of one step against the share that is allowed.

    Samples arrive group by group, so the share is taken of the samples that the step expects, and
    not of those seen so far: the first failure of a big step is no verdict on the reward. A step
    that turns out bigger (replaced groups) allows more.
    """

    max_error_rate: float
    expected_samples: int
    seen: int = 0
    errors: int = 0
    timeouts: int = 0
    first_failure: str | None = None

    @property
    def exceeded(self) -> bool:
        allowed = self.max_error_rate * max(self.expected_samples, self.seen)
        # 0.1 * 30 is a little above 3 in binary; the tolerance only absorbs rounding.
        return self.errors + self.timeouts > allowed + 1e-9


@dataclass
class RewardCounters:
    """Of one reward and one purpose. `begin_step` opens it.

    A sample counts in the budget that was open when it came, though the next step may begin before
    it has its score: failures of one step are no matter of another.
    """

    name: str
    config: RewardConfig
    budget: ErrorBudget | None = None
    _totals: dict[str, Mean] = field(default_factory=dict)

    def begin_step(self, expected_samples: int) -> None:
        """Open a new budget; samples under way keep the one that they came with."""
        self.budget = ErrorBudget(self.config.max_error_rate, expected_samples)

    def failed(
        self,
        sample: Sample,
        budget: ErrorBudget,
        line: str,
        details: str,
        *,
        timed_out: bool = False,
    ) -> Scored:
        """Return what stands in for a verdict; the first failure of a step is kept, and logged.

        Args:
            budget: that was `opened` when the sample came.
        """
        if budget.first_failure is None:
            budget.first_failure = f"sample {sample.id}:\n{details}"
            log.warning("reward %s failed on sample %s: %s", self.name, sample.id, line)
        on_error = self.config.on_error
        reward = None if on_error is None else Reward(on_error)
        return Scored(reward, failure=line, timed_out=timed_out)

    def count(self, scored: Scored, budget: ErrorBudget) -> None:
        """Add a verdict or a failure.

        Args:
            budget: that was `opened` when the sample came.

        Raises:
            RewardError: the failures of its step are more than `max_error_rate` allows.
        """
        failed, timed_out = scored.failure is not None, scored.timed_out
        budget.seen += 1
        budget.timeouts += timed_out
        budget.errors += failed and not timed_out
        self._add("error_rate", float(failed and not timed_out))
        self._add("timeout_rate", float(timed_out))
        if scored.reward is not None:
            self._add("mean", scored.reward.score)
            for part, value in scored.reward.parts.items():
                self._add(part, value)
        if budget.exceeded:
            raise RewardError(
                f"reward {self.name!r} failed on {budget.errors + budget.timeouts} of "
                f"the first {budget.seen} samples ({budget.errors} errors, {budget.timeouts} "
                f"timeouts), more than max_error_rate = {self.config.max_error_rate:g} of the "
                f"{max(budget.expected_samples, budget.seen)} to come allows; mend the reward, or "
                f"raise rewards.{self.name}.max_error_rate. First failure, {budget.first_failure}"
            )

    def opened(self) -> ErrorBudget:
        """Return the budget of the samples that come now.

        Raises:
            ValueError: no step has begun.
        """
        if self.budget is None:
            raise ValueError(f"reward {self.name!r}: call begin_step before score")
        return self.budget

    def take_metrics(self) -> Metrics:
        """`reward/<name>/{mean,error_rate,timeout_rate,<part>}` since the last call.

        `mean` and parts are over the samples that have a score. Errors and timeouts are counted
        apart.
        """
        taken: dict[str, Metric] = {
            f"reward/{self.name}/{key}": total for key, total in self._totals.items()
        }
        self._totals = {}
        return Metrics(taken)

    def _add(self, key: str, value: float) -> None:
        fresh = Mean(value)
        self._totals[key] = self._totals[key].merge(fresh) if key in self._totals else fresh


def counters_of(name: str, config: RewardConfig) -> dict[Purpose, RewardCounters]:
    """Return a closed book for each purpose."""
    return {purpose: RewardCounters(name, config) for purpose in Purpose}
