"""The page: one HTML file, which loads nothing and runs its own script only."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from roll.report import panels
from roll.report.chart_data import Charts, embedded
from roll.report.facts import facts_section
from roll.report.glance import banner, glance_table
from roll.report.groups import grouped
from roll.report.health.alarms import alarms
from roll.report.health.rules import RULES
from roll.report.markup import Markup, element, join
from roll.report.read import Run
from roll.report.sample_view import Pictures, samples_section
from roll.report.samples import Kept, read_samples

MAX_BYTES = 1_000_000
"""Number of bytes below which a page stays."""
_PICTURE_BYTES = 200_000
_SIZES = ((500, 3000), (250, 1500), (120, 800), (60, 400), (30, 200), (16, 100), (6, 40))
"""Points of a metric and characters of a text, from the most to the fewest: the first that fits."""
_FEWEST = 10
"""Characters of a text that are shown however many runs there are."""

SECTIONS = (
    panels.LEARNING,
    panels.POLICY,
    panels.RESPONSES,
    panels.AGREEMENT,
    panels.TIME,
    panels.MACHINES,
    panels.HARDWARE,
)


def page(runs: Sequence[Run], version: str | None = None) -> str:
    """Return the page of one run, or of several that are compared.

    Args:
        version: what a server calls this state of the run. The page then asks it for a newer one,
            and loads itself again. None: the page asks nobody.
    """
    groups = grouped(runs)
    ordered = [run for group in groups for run in group.runs]
    raised = [(run, alarms(run.records, RULES)) for run in ordered]
    places = {run.name: place for place, group in enumerate(groups) for run in group.runs}
    charts = Charts.of(groups, [(places[run.name], each) for run, own in raised for each in own])
    remarks: dict[str, list[str]] = {run.name: [] for run in ordered}
    kept = {run.name: read_samples(run.folder, remarks[run.name]) for run in ordered}
    top = [banner(run, own) for run, own in raised]
    top += [element("p", said, class_="dim") for own in remarks.values() for said in own]
    facts = facts_section(ordered)
    found = ""
    for points, characters in _SIZES:
        each = max(_FEWEST, characters // len(ordered))
        found = _page(charts, top, kept, facts, points, each, version)
        if len(found.encode()) < MAX_BYTES:
            break
    return found


def _page(
    charts: Charts,
    top: Sequence[Markup],
    kept: dict[str, dict[int, list[Kept]]],
    facts: Markup,
    points: int,
    characters: int,
    version: str | None,
) -> str:
    """Return a page whose metrics have at most `points` points, and whose texts are cut after
    `characters`."""
    runs = [run for group in charts.groups for run in group.runs]
    data = charts.data(points)
    drawn = {panel["section"] for panel in data["panels"]}
    parts = [element("h1", " · ".join(run.name for run in runs)), *top, glance_table(runs)]
    parts.append(element("noscript", "The charts need JavaScript; the tables do not."))
    for section in SECTIONS:
        if (place := panels.section_id(section)) in drawn:
            parts += [element("h2", section), element("div", id=place, class_="charts")]
    pictures = Pictures(_PICTURE_BYTES)
    parts.append(element("h2", "Samples"))
    for run in runs:
        if len(runs) > 1:
            parts.append(element("h3", run.name))
        parts.append(samples_section(kept[run.name], pictures, limit=characters))
    parts += [element("h2", "What was run"), facts]
    if (place := panels.section_id(panels.REST)) in drawn:
        rest = element("div", id=place, class_="charts")
        parts.append(element("details", element("summary", panels.REST), rest))
    if points < max(len(run.records) for run in runs):
        parts.append(
            element(
                "p",
                f"Charts show up to {points} steps of a metric, among them the peaks; all are in "
                "metrics.jsonl.",
                class_="dim",
            )
        )
    return document(runs[0].name, join(parts), embedded(data), version)


def waiting_page(name: str, told: str, version: str) -> str:
    """Return a page that has nothing to show yet.

    Args:
        name: name of the run.
        told: what it waits for.
        version: see `page`.
    """
    body = join([element("h1", name), element("p", told)])
    return document(name, body, embedded({"panels": []}), version)


def document(title: str, body: Markup, data: Markup, version: str | None) -> str:
    """Return the HTML document. Its policy lets no other script run, and nothing be loaded; only a
    page with a version may ask its server for a newer one."""
    script = files("roll.report").joinpath("static/page.js").read_text(encoding="utf-8")
    style = files("roll.report").joinpath("static/page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; "
        f"style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    follows = {}
    if version is not None:
        policy += "; connect-src 'self'"
        follows = {"data_version": version}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"roll: {title}"),
        element("style", Markup(style)),
    )
    content = element(
        "body",
        body,
        element("script", data, type="application/json", id="data"),
        element("script", Markup(script)),
        **follows,
    )
    return f"<!doctype html>\n{element('html', head, content, lang='en')}\n"


def _hash(source: str) -> str:
    """Return the name of a script or style in a policy."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"sha256-{digest}"
