"""Counters of one reward for one purpose: the budget of failures, and the metrics.

Training and validation have separate counters. Both may run at the same time if generation runs
ahead of training, and failures in one must not count in the other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum

from roll.config.sections.reward import RewardConfig
from roll.core.errors import RewardError
from roll.core.metrics import Mean, Metric, Metrics
from roll.core.pickling import pickle_by_fields
from roll.core.step_rewards import StepRewards
from roll.core.types import Sample
from roll.rewards.api import Reward

log = logging.getLogger(__name__)


class Purpose(StrEnum):
    """Purpose for which samples are scored."""

    TRAINING = "training"
    VALIDATION = "validation"


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Scored:
    """Result of one reward for one sample, or what replaces the result after a failure."""

    reward: Reward | None
    """Score of the sample; after a failure the score `on_error`. None if the reward failed and
    `on_error` is not set; the sample is then left out."""
    failure: str | None = None
    """Reason of the failure in one line; None if the reward gave a score."""
    timed_out: bool = False
    """True if the failure is a timeout."""
    steps: StepRewards | None = None
    """Rewards of steps, at tokens of the response; None if there are none."""


@dataclass(slots=True)
class ErrorBudget:
    """Count of the failures of one step, with the largest share of samples that may fail.

    Samples arrive group by group. The share is taken of the samples that the step expects, not of
    the samples seen so far, because one early failure in a large step says little about the reward.
    If the step needs more samples than expected (replaced groups), more may fail.
    """

    max_error_rate: float
    """Largest share of samples that may fail, in 0..1."""
    expected_samples: int
    """Number of samples that the step expects."""
    seen: int = 0
    """Number of samples that the reward scored or failed on."""
    errors: int = 0
    """Number of failures other than timeouts."""
    timeouts: int = 0
    first_failure: str | None = None
    """Sample id and traceback of the first failure."""

    @property
    def exceeded(self) -> bool:
        """True if more samples have failed than `max_error_rate` allows."""
        allowed = self.max_error_rate * max(self.expected_samples, self.seen)
        # The tolerance only absorbs rounding: 0.29 * 100 is 28.999999999999996.
        return self.errors + self.timeouts > allowed + 1e-9


@dataclass
class RewardCounters:
    """Counters of one reward for one purpose; call `begin_step` before the first sample.

    A sample counts in the budget of the step in which it arrived, even if the next step begins
    before the sample has its score. So failures of one step do not count in another.
    """

    name: str
    config: RewardConfig
    budget: ErrorBudget | None = None
    _totals: dict[str, Mean] = field(default_factory=dict)
    _times: dict[str, Mean] = field(default_factory=dict)

    def begin_step(self, expected_samples: int) -> None:
        """Open a new budget; samples under way keep the budget with which they arrived."""
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
        """Return the result of a sample on which the reward failed; keep and log the first failure.

        Args:
            sample: sample on which the reward failed.
            budget: result of `opened` when the sample arrived.
            line: reason of the failure in one line.
            details: traceback of the failure.
            timed_out: True if the failure is a timeout.
        """
        if budget.first_failure is None:
            budget.first_failure = f"sample {sample.id}:\n{details}"
            log.warning("reward %s failed on sample %s: %s", self.name, sample.id, line)
        on_error = self.config.on_error
        reward = None if on_error is None else Reward(on_error)
        return Scored(reward, failure=line, timed_out=timed_out)

    def count(self, scored: Scored, budget: ErrorBudget) -> None:
        """Count the result of a sample, or the failure on it, in `budget`, which `opened` returned
        when the sample arrived.

        Raises:
            RewardError: the step has more failures than `max_error_rate` allows.
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

    def took(self, queue_s: float, run_s: float, samples: int) -> None:
        """Count the times of samples that were scored together: in the queue, and running."""
        for key, seconds in (("queue_s", queue_s), ("run_s", run_s)):
            fresh = Mean(seconds * samples, samples)
            self._times[key] = self._times[key].merge(fresh) if key in self._times else fresh

    def opened(self) -> ErrorBudget:
        """Return the budget for samples that arrive now.

        Raises:
            ValueError: no step has begun.
        """
        if self.budget is None:
            raise ValueError(f"reward {self.name!r}: call begin_step before score")
        return self.budget

    def take_metrics(self) -> Metrics:
        """Return `reward/<name>/{mean,error_rate,timeout_rate,<part>}` and
        `rewards/<name>/{queue_s,run_s}` since the last call.

        `mean` and the parts are means over the samples with a score, including `on_error` scores.
        `error_rate` does not include timeouts. `queue_s` and `run_s` are means over samples: the
        wait for a place, and the time of the function (of a group, that of all of it).
        """
        taken: dict[str, Metric] = {
            f"reward/{self.name}/{key}": total for key, total in self._totals.items()
        }
        taken |= {f"rewards/{self.name}/{key}": time for key, time in self._times.items()}
        self._totals, self._times = {}, {}
        return Metrics(taken)

    def _add(self, key: str, value: float) -> None:
        """Add a value to the mean of the metric `key`."""
        fresh = Mean(value)
        self._totals[key] = self._totals[key].merge(fresh) if key in self._totals else fresh


def counters_of(name: str, config: RewardConfig) -> dict[Purpose, RewardCounters]:
    """Return new counters, without an open budget, for each purpose."""
    return {purpose: RewardCounters(name, config) for purpose in Purpose}
