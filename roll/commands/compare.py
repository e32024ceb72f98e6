"""`roll compare`: several runs side by side in the terminal, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from roll.core.errors import UserError
from roll.report.comparison import MetricRow, Went, metric_rows, settings_rows
from roll.report.glance import brief
from roll.report.groups import RunGroup, grouped
from roll.report.health.alarms import Alarm, alarms
from roll.report.health.rules import RULES
from roll.report.live.screen import curve
from roll.report.read import Run, read_runs
from roll.report.series import shown

WIDTH = 12
"""Number of characters of a curve."""


def compared(folders: Sequence[Path]) -> list[RunGroup]:
    """Return the runs in these folders, those together that differ in their seed only.

    Raises:
        UserError: there is but one folder.
        DataError: a folder holds no run, or is named twice.
    """
    if len(folders) < 2:
        raise UserError(
            "a comparison needs two runs or more; `roll report OUTPUT_DIR` and `roll watch "
            "OUTPUT_DIR` show one"
        )
    return grouped(read_runs(folders))


def comparison(groups: Sequence[RunGroup]) -> RenderableType:
    """Return what a terminal shows: runs and their alarms, settings that differ, main metrics."""
    parts: list[RenderableType] = []
    for group in groups:
        for run in group.runs:
            parts.append(_head(run, group))
            parts += [Text(f"  ! {alarm.text}", style="red") for alarm in _alarms(run)]
    settings = settings_rows(groups)
    if settings:
        table = Table("setting", *(escape(group.label) for group in groups))
        for key, values in settings:
            table.add_row(Text(key), *(Text(value) for value in values))
        parts += [Text(), table]
    else:
        parts += [Text(), Text("no setting differs")]
    return Group(*parts, Text(), _metrics(metric_rows(groups)))


def _head(run: Run, group: RunGroup) -> Text:
    """Return one line about a run: name, status, steps."""
    told = [run.name, run.status, f"{run.done} steps"]
    if len(group.runs) > 1:
        told.insert(1, f"of {group.label}")
    return Text(" · ".join(told), style="bold")


def _alarms(run: Run) -> list[Alarm]:
    return alarms(run.records, RULES)


def _metrics(rows: Sequence[MetricRow]) -> Table:
    """Return the table of metrics, each with one line for every group that has it."""
    seeds = any(len(went.lasts) > 1 for row in rows for went in row.groups)
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=24)
    for name in ("first", "best", "last", *(["spread"] if seeds else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True, min_width=WIDTH)
    for row in rows:
        table.add_row(Text(row.label, style="bold"))
        for went in row.groups:
            lasts = went.lasts.values()
            spread = brief(max(lasts) - min(lasts)) if len(lasts) > 1 else ""
            table.add_row(
                Text(f"  {went.group}"),
                brief(went.first),
                "" if went.best is None else brief(went.best),
                Text(brief(went.last), style="bold"),
                *([spread] if seeds else []),
                curve(went.curve, WIDTH),
            )
    return table


def as_json(groups: Sequence[RunGroup]) -> str:
    """Return the comparison as JSON. Numbers that are not finite are texts, as in a page."""
    told: dict[str, Any] = {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "group": group.label,
                "status": run.status,
                "steps": run.done,
                "alarms": [{"rule": one.rule, "text": one.text} for one in _alarms(run)],
            }
            for group in groups
            for run in group.runs
        ],
        "settings": {
            key: dict(zip((group.label for group in groups), values, strict=True))
            for key, values in settings_rows(groups)
        },
        "metrics": {
            row.metric: {went.group: _numbers(went) for went in row.groups}
            for row in metric_rows(groups)
        },
    }
    return json.dumps(told, indent=2, ensure_ascii=False)


def _numbers(went: Went) -> dict[str, Any]:
    return {
        "first": shown(went.first),
        "best": shown(went.best),
        "last": shown(went.last),
        "last_by_run": {name: shown(value) for name, value in went.lasts.items()},
        "curve": [shown(value) for value in went.curve],
    }
