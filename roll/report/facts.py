"""The section of settings: those that differ between runs or from their defaults, and devices."""

from __future__ import annotations

from collections.abc import Sequence

from roll.config import load_config
from roll.config.run import RunConfig
from roll.config.step_plan import device_map, plan_lines
from roll.core.errors import UserError
from roll.output_dir.config_diff import in_words, leaves
from roll.report.groups import differences
from roll.report.markup import Markup, element, join
from roll.report.read import Run

_ALWAYS = ("kind", "preset", "fn", "path")
"""Last parts of keys that are shown even if they have their default."""


def facts_section(runs: Sequence[Run]) -> Markup:
    """Return the settings of runs: those that differ between them, then those of each that are not
    defaults, with the sizes of a step and the devices."""
    parts = []
    if len(runs) > 1:
        rows = [element("tr", *(element("th", said) for said in ("", *(r.name for r in runs))))]
        rows += [
            element("tr", element("th", key), *(element("td", value) for value in values))
            for key, values in differences(runs)
        ]
        parts += [element("h3", "Settings that differ"), element("table", *rows)]
    parts += [_of_run(run, open_=len(runs) == 1) for run in runs]
    return join(parts)


def _of_run(run: Run, *, open_: bool) -> Markup:
    rows: list[tuple[str, str]] = [("folder", str(run.folder))]
    rows += _rows_of_data(run)
    rows += [(f"version of {name}", str(said)) for name, said in _versions(run)]
    try:
        config = load_config(run.folder / "config.yaml", import_code=False).config
    except (UserError, OSError) as error:
        rows.append(("settings", f"not understood by this version of roll: {error}"))
        rows += [(key, in_words(value)) for key, value in leaves(run.config)]
    else:
        rows += [(f"pool {pool}", ", ".join(roles)) for pool, roles in device_map(config).items()]
        rows += [("plan", line) for line in plan_lines(config)]
        rows += settings_not_default(config)
    table = element(
        "table",
        *(element("tr", element("th", key), element("td", value)) for key, value in rows),
    )
    unfolded = {"open": ""} if open_ else {}
    return element("details", element("summary", f"Settings of {run.name}"), table, **unfolded)


def _rows_of_data(run: Run) -> list[tuple[str, str]]:
    """Return what became of the rows of each source, which the run wrote into its summary."""
    found = run.summary.get("rows")
    told = []
    for source in found if isinstance(found, list) else []:
        try:
            what = "validation rows" if source["validation"] else "training rows"
            left_out = [f"{count} with {reason}" for reason, count in source["left_out"].items()]
            said = f"{source['kept']} of {source['read']}"
            said += f"; left out: {', '.join(left_out)}" if left_out else ""
            told.append((f"{what} of {source['name']}", said))
        except (KeyError, TypeError, AttributeError):
            continue  # not written by this version
    return told


def _versions(run: Run) -> list[tuple[str, object]]:
    """Return the versions of packages that the run wrote into its summary."""
    found = run.summary.get("versions")
    return list(found.items()) if isinstance(found, dict) else []


def settings_not_default(config: RunConfig) -> list[tuple[str, str]]:
    """Return the settings that are not defaults, by dotted key, and the kinds of parts."""
    own = {key for key, _ in leaves(config.model_dump(mode="json", exclude_defaults=True))}
    return [
        (key, in_words(value))
        for key, value in leaves(config.model_dump(mode="json"))
        if key in own or (key.split(".")[-1] in _ALWAYS and value is not None)
    ]
