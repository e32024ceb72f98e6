"""Groups of runs that differ in their seed only, and differences between settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.output_dir.config_diff import EXPECTED, NOT_SET, leaves, value_at
from roll.report.read import Run


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ in their seed only; or a single one."""

    label: str
    runs: tuple[Run, ...]


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Put runs together that differ in their seed only. Runs without readable settings stay
    alone."""
    found: list[tuple[dict[str, Any] | None, list[Run]]] = []
    for run in runs:
        mine = _compared(run)
        for settings, members in found:
            if mine is not None and settings == mine:
                members.append(run)
                break
        else:
            found.append((mine, [run]))
    labels = [_label(members) for _, members in found]
    return [
        # Names such as run1 to run4 have the same beginning in both groups of two.
        RunGroup(label if labels.count(label) == 1 else _names(members), tuple(members))
        for label, (_, members) in zip(labels, found, strict=True)
    ]


def _compared(run: Run) -> dict[str, Any] | None:
    """Return the settings that must be equal, by dotted key; None if they are not known."""
    if not run.config:
        return None
    own = (*EXPECTED, "seed")
    return {key: value for key, value in leaves(run.config) if key.split(".")[0] not in own}


def _label(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    start = runs[0].name
    while not all(run.name.startswith(start) for run in runs):
        start = start[:-1]
    return f"{start.rstrip('-_./ ') or runs[0].name} ({len(runs)} seeds)"


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ, by dotted key, with the value of each run in words. An empty
    list or mapping that has entries in another run is told by these."""
    settings = [dict(leaves(run.config)) for run in runs]
    keys = sorted({key for each in settings for key in each})
    outer = {key[:at] for key in keys for at, sign in enumerate(key) if sign == "."}
    found = []
    for key in keys:
        if key not in outer and len({repr(each.get(key, NOT_SET)) for each in settings}) > 1:
            found.append((key, [value_at(each, key) for each in settings]))
    return found
