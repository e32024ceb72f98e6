"""`Course`: how the metrics of a run went, in the few numbers that alarms compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property

from roll.report.records import Record
from roll.report.series import names_of

MIN_STEPS = 8
"""Number of steps before a start can be told from an end."""
SCORES = ("/mean@1", "/accuracy")
"""Ends of the names of validation metrics that say how good the policy is."""


class Course:
    """The metrics of a run over its steps.

    Start and end of a metric are medians over several steps, so that a single one decides nothing.
    The start has fewer, because much may happen there.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        """Take the records of all steps, in order."""
        self._records = records
        self.steps = [record for record in records if "time/step_s" in record]
        """Records of training steps."""

    @property
    def long_enough(self) -> bool:
        """True if a start can be told from an end."""
        return len(self.steps) >= MIN_STEPS

    @cached_property
    def window(self) -> int:
        """Number of steps of the end; the start has half of them, but at least 3."""
        return max(3, min(20, len(self.steps) // 6))

    def names(self, pattern: str) -> list[str]:
        """Return the names of the metrics of steps that match a pattern with `*`."""
        return [name for name in self._all_names if fnmatchcase(name, pattern)]

    @cached_property
    def _all_names(self) -> list[str]:
        """Names of all metrics of steps."""
        return names_of(self.steps)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return the finite values of a metric, with the step of each."""
        return [
            (int(record["step"]), record[name])
            for record in self.steps
            if name in record and math.isfinite(record[name])
        ]

    def start(self, name: str) -> float | None:
        """Return the value at the start; None without the metric, or if the run is too short."""
        values = [value for _, value in self.points(name)]
        if not self.long_enough or len(values) < MIN_STEPS:
            return None
        return statistics.median(values[: max(3, self.window // 2)])

    def end(self, name: str) -> float | None:
        """Return the value at the end; None without the metric, or if the run is too short."""
        values = [value for _, value in self.points(name)]
        if not self.long_enough or len(values) < MIN_STEPS:
            return None
        return statistics.median(values[-self.window :])

    def middle(self, name: str) -> float | None:
        """Return the median over all steps; None as in `end`."""
        if self.end(name) is None:
            return None
        return statistics.median(value for _, value in self.points(name))

    def late_sum(self, name: str) -> float:
        """Return the sum over the steps of the end; 0 without the metric."""
        return math.fsum(value for _, value in self.points(name)[-self.window :])

    def since_above(self, name: str, limit: float) -> int | None:
        """Return the step from which on a metric is at or above a limit for good; None if it is not
        at the end. A value counts as the median of itself and its four neighbours."""
        return self._since(name, lambda near: near >= limit)

    def since_below(self, name: str, limit: float) -> int | None:
        """Return the same for values at or below the limit."""
        return self._since(name, lambda near: near <= limit)

    def _since(self, name: str, holds: Callable[[float], bool]) -> int | None:
        points = self.points(name)
        values = [value for _, value in points]
        begun = None
        for place, (step, _) in enumerate(points):
            if not holds(statistics.median(values[max(0, place - 2) : place + 3])):
                begun = None
            elif begun is None:
                begun = step
        return begun

    @cached_property
    def gain(self) -> float | None:
        """Rise of the mean reward from start to end, in standard deviations of the rewards at the
        start; None without a reward."""
        start, end = self.start("reward/mean"), self.end("reward/mean")
        if start is None or end is None:
            return None
        spread = self.start("reward/std") or 0.0
        if spread <= 1e-9:
            return 0.0 if abs(end - start) <= 1e-9 else math.copysign(math.inf, end - start)
        return (end - start) / spread

    @cached_property
    def learned(self) -> bool:
        """True if the reward rose clearly, or up to where samples hardly differ any more. Then low
        entropy and equal rewards are no fault. Also True without a reward."""
        if self.gain is None or self.gain >= 0.3:
            return True
        start, end = self.start("reward/std"), self.end("reward/std")
        settled = start is not None and end is not None and end < 0.6 * start
        return self.gain >= 0.1 and settled

    @cached_property
    def fall(self) -> float | None:
        """Fall of the mean reward from the first step, whose samples no update has changed, to the
        end, in standard deviations of the rewards in that step. The median of the first steps is
        too late where a single update breaks the policy. None without a reward."""
        first, spread = self.points("reward/mean")[:1], self.points("reward/std")[:1]
        end = self.end("reward/mean")
        if not first or not spread or end is None or spread[0][1] <= 1e-9:
            return None
        return (first[0][1] - end) / spread[0][1]

    @cached_property
    def held_out_gain(self) -> float | None:
        """Largest rise of a score on held-out data, from its first value to the better of its last
        two; None without such scores."""
        gains = [max(v for _, v in p[-2:]) - p[0][1] for p in self.held_out.values()]
        return max(gains, default=None)

    @cached_property
    def held_out(self) -> dict[str, list[tuple[int, float]]]:
        """Scores on held-out data by name, with the step of each, if there are three or more."""
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self._records:
            for name, value in record.items():
                if name.startswith("val/") and name.endswith(SCORES) and math.isfinite(value):
                    found.setdefault(name, []).append((int(record["step"]), value))
        return {name: points for name, points in found.items() if len(points) >= 3}
