"""Runs compared in numbers: how the main metrics of groups of seeds went, and settings that
differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from roll.config import load_config
from roll.core.errors import UserError
from roll.output_dir.config_diff import NOT_SET
from roll.report.facts import settings_not_default
from roll.report.glance import ROWS
from roll.report.groups import RunGroup, differences
from roll.report.read import Run
from roll.report.series import mean, names_of, values_of

BETTER = {
    "val/*/mean@1": max,
    "val/*/accuracy": max,
    "val/*/loss": min,
    "reward/mean": max,
}
"""Patterns of `ROWS` of metrics that have a best value -> function that finds it."""


@dataclass(frozen=True, slots=True)
class Went:
    """Course of a metric in a group of runs that differ in their seed only."""

    group: str
    first: float
    """Mean over the runs of the first value of each."""
    last: float
    """Mean over the runs of the last value of each."""
    lasts: dict[str, float]
    """Name of a run -> its last value."""
    best: float | None
    """Mean over the runs of the best value of each; None for a metric of which neither large nor
    small values are better, or without a finite value."""
    curve: list[float]
    """Mean over the runs that have a value, at every step that one of them has."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all groups that have it."""

    label: str
    metric: str
    groups: list[Went]


def metric_rows(groups: Sequence[RunGroup]) -> list[MetricRow]:
    """Return how each main metric went in each group, held-out scores first."""
    runs = [run for group in groups for run in group.runs]
    metrics = dict.fromkeys(name for run in runs for name in names_of(run.records))
    rows = []
    for label, pattern in ROWS:
        for name in metrics:
            if fnmatchcase(name, pattern):
                went = [_went(group, name, pattern) for group in groups]
                said = f"{label} ({name.split('/')[1]})" if "*" in pattern else label
                rows.append(MetricRow(said, name, [one for one in went if one is not None]))
    return rows


def _went(group: RunGroup, name: str, pattern: str) -> Went | None:
    """Return how a metric went in a group; None if no run of it has the metric."""
    series = {run.name: values_of(run.records, name) for run in group.runs}
    known = {run: [values[step] for step in sorted(values)] for run, values in series.items()}
    known = {run: values for run, values in known.items() if values}
    if not known:
        return None
    better = BETTER.get(pattern)
    best = None
    if better is not None:
        finite = [[v for v in values if math.isfinite(v)] for values in known.values()]
        found = [better(values) for values in finite if values]
        best = mean(found) if found else None
    steps = sorted({step for values in series.values() for step in values})
    return Went(
        group=group.label,
        first=mean([values[0] for values in known.values()]),
        last=mean([values[-1] for values in known.values()]),
        lasts={run: values[-1] for run, values in known.items()},
        best=best,
        curve=[mean([v[step] for v in series.values() if step in v]) for step in steps],
    )


def settings_rows(groups: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, by dotted key, with the values of each group,
    which are several for its seeds. Left out are folders of runs, which always differ, and the
    defaults of parts that only some of the runs have, such as a reward."""
    runs = [run for group in groups for run in group.runs]
    chosen = [_chosen(run) for run in runs]
    found = []
    for key, values in differences(runs):
        partly = NOT_SET in values
        if key == "output_dir" or (partly and not any(c is None or key in c for c in chosen)):
            continue
        mine = dict(zip((run.name for run in runs), values, strict=True))
        told = [", ".join(dict.fromkeys(mine[run.name] for run in g.runs)) for g in groups]
        found.append((key, told))
    return found


def _chosen(run: Run) -> set[str] | None:
    """Return the keys of a run that are not defaults; None if this version of roll does not
    understand its settings."""
    try:
        config = load_config(run.folder / "config.yaml", import_code=False).config
    except (UserError, OSError):
        return None
    return {key for key, _ in settings_not_default(config)}
