"""The screen of `roll watch` in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roll.report.glance import ROWS, brief
from roll.report.health.alarms import Alarm
from roll.report.live.progress import LATEST, Progress, brief_time
from roll.report.panels import STEP_PARTS
from roll.report.read import Run
from roll.report.series import mean, names_of, values_of

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 30
"""Number of characters of a curve and of the bar of times."""
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "white", "bright_black")


def screen(run: Run, alarms: Sequence[Alarm], now: Progress) -> RenderableType:
    """Return the screen of a run: how far it is, what is wrong, curves, and times of a step."""
    parts: list[RenderableType] = [_head(run, now)]
    for alarm in alarms:
        parts.append(Text(f"! {alarm.text}", style="bold red"))
        parts.append(Text(f"  Try: {alarm.advice}.", style="red"))
    parts += [Text(), _curves(run), Text(), _times(run)]
    return Group(*parts)


def _head(run: Run, now: Progress) -> Text:
    """Return one line: name, status, steps, times."""
    steps = f"{now.done} of {now.planned} steps" if now.planned else f"{now.done} steps"
    told = [run.name, now.status, steps]
    if not now.ended:
        if now.left_s is not None:
            told.append(f"{brief_time(now.left_s)} left")
        usual = "" if now.usual_s is None else f" (a step takes {now.usual_s:.3g} s)"
        told.append(f"last record {brief_time(now.waited_s)} ago{usual}")
    for key in ("error", "ended_early"):
        if isinstance(run.summary.get(key), str) and now.ended:
            told.append(run.summary[key])
    style = {"silent": "bold red", "failed": "bold red", "unfinished": "yellow"}
    return Text(" · ".join(told), style=style.get(now.status, "bold"))


def _curves(run: Run) -> Table:
    """Return first value, curve and last value of the main metrics."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("first", justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True, min_width=WIDTH)
    table.add_column("last", justify="right", no_wrap=True)
    metrics = names_of(run.records)
    for label, pattern in ROWS:
        for name in metrics:
            if not fnmatchcase(name, pattern):
                continue
            values = [value for _, value in sorted(values_of(run.records, name).items())]
            title = label if "*" not in pattern else f"{label} ({name})"
            cells = (title, brief(values[0]), curve(values, WIDTH), brief(values[-1]))
            table.add_row(*map(Text, cells))
    return table


def curve(values: Sequence[float], width: int) -> str:
    """Return a line of at most `width` blocks, whose heights are the values from the smallest to
    the largest; of many values, each block is a mean. A value that is not finite is a `!`."""
    count = min(width, len(values))
    means = [
        mean(values[len(values) * i // count : len(values) * (i + 1) // count])
        for i in range(count)
    ]
    finite = [value for value in means if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high / 2 - low / 2  # of halves, so that no difference overflows
    return "".join(
        BLOCKS[round((value / 2 - low / 2) / span * (len(BLOCKS) - 1)) if span else 0]
        if math.isfinite(value)
        else "!"
        for value in means
    )


def _times(run: Run) -> RenderableType:
    """Return a bar of the parts of a step, medians of the latest steps, and what each takes."""
    latest = run.training[-LATEST:]
    taken = {
        name: median(record.get(name, 0.0) for record in latest)
        for name in STEP_PARTS
        if any(name in record for record in latest)
    }
    whole = math.fsum(value for value in taken.values() if math.isfinite(value))
    if not whole:
        return Text()
    bar, keys = Text(), Text()
    for (name, seconds), colour in zip(taken.items(), COLOURS, strict=False):
        if 0 < seconds < math.inf:
            bar.append("█" * max(1, round(seconds / whole * WIDTH)), style=colour)
            label = name.removeprefix("time/").removesuffix("_s")
            keys.append(f"{label} {seconds:.3g} s   ", style=colour)
    return Group(Text(f"A step, seconds (medians of {len(latest)})"), bar, keys)
