"""The numbers of all charts of a page, as one JSON object, which the page's script draws."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.report.groups import RunGroup
from roll.report.health.alarms import Alarm
from roll.report.markup import Markup
from roll.report.panels import panels_of, section_id
from roll.report.series import kept_steps, names_of, shown, values_of


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a page, before points are thinned."""

    groups: Sequence[RunGroup]
    values: Mapping[str, Sequence[Sequence[Mapping[int, float]]]]
    """Metric -> for each group, for each of its runs, the values by step."""
    alarms: Sequence[tuple[int, Alarm]]
    """Alarms, each with the place of its group."""

    @classmethod
    def of(cls, groups: Sequence[RunGroup], alarms: Sequence[tuple[int, Alarm]]) -> Charts:
        """Take all metrics of all runs."""
        runs = [run for group in groups for run in group.runs]
        names = dict.fromkeys(name for run in runs for name in names_of(run.records))
        values = {
            name: [[values_of(run.records, name) for run in group.runs] for group in groups]
            for name in names
        }
        return cls(groups, values, alarms)

    def data(self, points: int) -> dict[str, Any]:
        """Return the object that a page embeds.

        `groups` are labels and names of runs. `series` has for each metric and group the place of
        its steps in `steps`, and the values of each run at these steps, null where it has none;
        null for a group without the metric. `panels` say which metrics a chart shows.

        Args:
            points: largest number of steps of one metric.
        """
        panels = panels_of(list(self.values))
        steps: dict[tuple[int, ...], int] = {}
        series: dict[str, list[dict[str, Any] | None]] = {name: [] for name in self.values}
        together = {
            name: names for panel, names in panels if panel.kind == "stack" for name in names
        }
        for name, by_group in self.values.items():
            for place, runs in enumerate(by_group):
                if not any(runs):
                    series[name].append(None)
                    continue
                kept = tuple(kept_steps(self._sums(together.get(name, [name]), place), points))
                rows = [[shown(values.get(step)) for step in kept] for values in runs]
                series[name].append({"steps": steps.setdefault(kept, len(steps)), "values": rows})
        return {
            "groups": [
                {"label": group.label, "runs": [run.name for run in group.runs]}
                for group in self.groups
            ],
            "steps": list(steps),
            "series": series,
            "panels": [
                {
                    "section": section_id(panel.section),
                    "title": panel.title,
                    "hint": panel.hint,
                    "kind": panel.kind,
                    "log": panel.log,
                    "names": names,
                }
                for panel, names in panels
            ],
            "alarms": [
                {"group": place, "metric": alarm.metric, "since": alarm.since, "rule": alarm.rule}
                for place, alarm in self.alarms
            ],
        }

    def _sums(self, names: Sequence[str], place: int) -> list[dict[int, float]]:
        """Return the sum of metrics by step of each run of a group. Layers of a stack are thinned
        by it, so that all of them have the same steps."""
        sums: list[dict[int, float]] = [{} for _ in self.values[names[0]][place]]
        for name in names:
            for total, values in zip(sums, self.values[name][place], strict=True):
                for step, value in values.items():
                    total[step] = total.get(step, 0.0) + value
        return sums


def embedded(data: Mapping[str, Any]) -> Markup:
    """Return the object as JSON that cannot end the element it stands in."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
