"""Points of metrics that a chart shows: of several runs, thinned, and as numbers of a page."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from roll.report.records import Record

DIGITS = 6
"""Number of significant digits of a value on a page."""


def values_of(records: Sequence[Record], name: str) -> dict[int, float]:
    """Return the values of a metric by step."""
    return {int(record["step"]): record[name] for record in records if name in record}


def mean(values: Collection[float]) -> float:
    """Return the mean of some values; NaN if it is no number, as of infinities of both signs."""
    try:
        return fmean(values)
    except (ValueError, OverflowError):
        return math.nan


def names_of(records: Sequence[Record]) -> list[str]:
    """Return the names of all metrics, in the order in which they first occur."""
    return [n for n in dict.fromkeys(n for record in records for n in record) if n != "step"]


def kept_steps(runs: Sequence[Mapping[int, float]], limit: int) -> list[int]:
    """Return the steps to show of one metric, at most `limit` of them (but at least 4).

    Every one of equally long stretches keeps the steps of its smallest and its largest value, so
    that no peak is lost; of several runs, of the mean over them. The first and the last step stay.
    A value that is not finite counts as the largest.

    Args:
        runs: values by step of each run.
        limit: largest number of steps.
    """
    steps = sorted({step for values in runs for step in values})
    if len(steps) <= limit:
        return steps
    pieces = max(1, (limit - 2) // 2)
    kept = {steps[0], steps[-1]}
    for number in range(pieces):
        part = steps[len(steps) * number // pieces : len(steps) * (number + 1) // pieces]
        kept |= {
            min(part, key=lambda s: _height(runs, s)),
            max(part, key=lambda s: _height(runs, s)),
        }
    return sorted(kept)


def _height(runs: Sequence[Mapping[int, float]], step: int) -> float:
    """Return the mean of the values at a step."""
    found = [values[step] for values in runs if step in values]
    height = mean(found)
    return height if math.isfinite(height) else math.inf


def shown(value: float | None) -> float | int | str | None:
    """Return a value as it stands in a page: rounded to `DIGITS` significant digits; as a text if
    it is not finite, because JSON has no such numbers; None if there is none."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
