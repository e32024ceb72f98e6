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
    found: dict[str, None] = {}
    for record in records:  # most have no new name, and there may be millions of names in all
        if not record.keys() <= found.keys():
            found |= dict.fromkeys(record)
    return [name for name in found if name != "step"]


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
    heights = _heights(runs, steps)
    pieces = max(1, (limit - 2) // 2)
    kept = {steps[0], steps[-1]}
    for number in range(pieces):
        part = steps[len(steps) * number // pieces : len(steps) * (number + 1) // pieces]
        kept |= {min(part, key=heights.__getitem__), max(part, key=heights.__getitem__)}
    return sorted(kept)


def _heights(runs: Sequence[Mapping[int, float]], steps: Sequence[int]) -> dict[int, float]:
    """Return the mean of the values at each step; infinity in place of one that is not finite."""
    if len(runs) == 1:  # at once: there may be millions of values
        means = dict(runs[0])
    else:
        means = {step: mean([each[step] for each in runs if step in each]) for step in steps}
    return {step: value if math.isfinite(value) else math.inf for step, value in means.items()}


def shown(value: float | None) -> float | int | str | None:
    """Return a value as it stands in a page: rounded to `DIGITS` significant digits; as a text if
    it is not finite, because JSON has no such numbers; None if there is none."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
