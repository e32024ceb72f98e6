"""Results of an evaluation as an HTML page: the table, and curves over the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.commands.eval.results import COLUMNS, Line, row_of
from roll.commands.eval.scores import Score
from roll.report.chart_data import embedded
from roll.report.markup import Markup, element, join
from roll.report.page import document
from roll.report.panels import section_id
from roll.report.series import shown

SECTION = "Over checkpoints"

Curves = Mapping[str, Mapping[str, Mapping[int, Score]]]
"""Name of a score, such as `gsm8k/mean@8` -> run -> step -> score."""


def results_page(lines: Sequence[Line]) -> str:
    """Return the page. A run has curves if several of its checkpoints were evaluated."""
    rows = [element("tr", *(element("td", cell) for cell in row_of(line))) for line in lines]
    head = element("tr", *(element("th", column) for column in COLUMNS))
    parts = [
        element("h1", "Evaluation"),
        element("table", head, *rows),
        element("p", "mean +- half of its 95 % interval, by question", class_="dim"),
    ]
    curves = curves_of(lines)
    if curves:
        parts += [
            element("h2", SECTION),
            element("noscript", "The charts need JavaScript; the table does not."),
            element("div", id=section_id(SECTION), class_="charts"),
        ]
    return document("evaluation", join(parts), _embedded(curves), None)


def curves_of(lines: Sequence[Line]) -> Curves:
    """Return the scores of runs with several checkpoints, by step."""
    steps: dict[str, set[int]] = {}
    for line in lines:
        if line.run is not None and line.step is not None:
            steps.setdefault(line.run, set()).add(line.step)
    found: dict[str, dict[str, dict[int, Score]]] = {}
    for line in lines:
        if line.run is None or line.step is None or len(steps[line.run]) < 2:
            continue
        for name, score in line.whole.by_name.items():
            by_run = found.setdefault(f"{line.task}/{name}", {})
            by_run.setdefault(line.run, {})[line.step] = score
    return found


def _embedded(curves: Curves) -> Markup:
    """Return the object that the script of a report draws. A run stands for a group there, and the
    score and both ends of its interval for three runs of it: their mean is the score, their
    smallest and largest value are the band."""
    runs = list(dict.fromkeys(run for by_run in curves.values() for run in by_run))
    steps: dict[tuple[int, ...], int] = {}
    series: dict[str, list[dict[str, Any] | None]] = {}
    for name, by_run in curves.items():
        series[name] = []
        for run in runs:
            points = sorted(by_run.get(run, {}).items())
            place = steps.setdefault(tuple(step for step, _ in points), len(steps))
            scores = [score for _, score in points]
            rows = [[shown(value) for value in values] for values in _with_ends(scores)]
            series[name].append({"steps": place, "values": rows} if points else None)
    data = {
        "groups": [{"label": run, "runs": [run]} for run in runs],
        "steps": list(steps),
        "series": series,
        "panels": [_panel(name) for name in curves],
        "alarms": [],
    }
    return embedded(data)


def _panel(name: str) -> dict[str, Any]:
    return {
        "section": section_id(SECTION),
        "title": name,
        "hint": "with its 95 % interval, by question",
        "kind": "lines",
        "log": False,
        "names": [name],
    }


def _with_ends(scores: Sequence[Score]) -> list[list[float | None]]:
    """Return the values of scores, then the low and the high ends of their intervals, if they have
    any."""
    values: list[float | None] = [score.value for score in scores]
    intervals = [score.interval for score in scores]
    if not any(intervals):
        return [values]
    low = [None if one is None else one[0] for one in intervals]
    return [values, low, [None if one is None else one[1] for one in intervals]]
