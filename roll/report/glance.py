"""The top of a page: is the run healthy, and how far did it come."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from roll.report.health.alarms import Alarm
from roll.report.health.course import MIN_STEPS
from roll.report.markup import Markup, element
from roll.report.read import Run
from roll.report.series import names_of, shown, values_of

ROWS = (
    ("Held-out score", "val/*/mean@1"),
    ("Held-out share that passes", "val/*/pass@1"),
    ("Held-out accuracy", "val/*/accuracy"),
    ("Held-out loss", "val/*/loss"),
    ("Reward", "reward/mean"),
    ("Entropy, nats", "entropy"),
    ("KL from the reference, nats", "kl/ref"),
    ("Tokens of a response", "response_tokens/mean"),
    ("Share of truncated responses", "truncated_fraction"),
    ("Share of groups with equal rewards", "groups/equal_rewards_fraction"),
    ("Engine against trainer, log-prob", "mismatch/logprob_abs_mean"),
    ("Loss", "loss/total"),
    ("Seconds of a step", "time/step_s"),
    ("Generated tokens per second", "perf/generated_tokens_per_s"),
    ("Share of the devices' peak in training", "perf/actor_train/train_mfu"),
    ("Share of time that GPUs compute", "gpu/utilisation"),
    ("Memory of the fullest machine, GB", "machine/memory_used_gb"),
)
"""Label and metric of each line of the table; of each, its first and last value are shown."""


def banner(run: Run, alarms: Sequence[Alarm]) -> Markup:
    """Return what is wrong with a run, in words, with what to try; or that nothing is."""
    steps = run.done
    planned = run.config.get("max_steps")
    done = f"{steps} of {planned} steps" if isinstance(planned, int) else f"{steps} steps"
    told: list[str] = [element("span", f"{run.name} · {run.status} · {done}", class_="dim")]
    for key in ("error", "ended_early"):
        if isinstance(run.summary.get(key), str):
            told.append(element("div", run.summary[key]))
    if alarms:
        count = f"{len(alarms)} alarms" if len(alarms) > 1 else "1 alarm"
        lines = [
            element("li", element("b", alarm.text), element("div", f"Try: {alarm.advice}."))
            for alarm in alarms
        ]
        told = [element("b", count), " ", *told, element("ul", *lines)]
    elif len(run.training) < MIN_STEPS:
        told = [element("b", f"Too early to judge: alarms need {MIN_STEPS} steps"), " ", *told]
    else:
        told = [element("b", f"No alarm in {len(run.training)} steps"), " ", *told]
    bad = " bad" if alarms or run.status == "failed" else ""
    told += [element("div", remark, class_="dim") for remark in run.remarks]
    return element("div", *told, class_=f"banner{bad}")


def glance_table(runs: Sequence[Run]) -> Markup:
    """Return first and last value of the main metrics of each run."""
    metrics = dict.fromkeys(name for run in runs for name in names_of(run.records))
    head = element("tr", element("th", ""), *(element("th", run.name) for run in runs))
    rows = [
        element(
            "tr",
            element("th", label if "*" not in pattern else f"{label} ({name})"),
            *(_cell(run, name) for run in runs),
        )
        for label, pattern in ROWS
        for name in metrics
        if fnmatchcase(name, pattern)
    ]
    return element("table", head, *rows)


def _cell(run: Run, name: str) -> Markup:
    points = sorted(values_of(run.records, name).items())
    if not points:
        return element("td", "")
    first, last = (
        element("span", brief(value), data_metric=name, data_step=step, data_value=shown(value))
        for step, value in (points[0], points[-1])
    )
    return element("td", first, " → ", last) if len(points) > 1 else element("td", last)


def brief(value: float) -> str:
    """Return a number for people, with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
