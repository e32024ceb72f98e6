"""`Run`: what a run has written into its folder so far. A folder that is damaged, or still being
written, is read as far as it goes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.core.errors import DataError
from roll.output_dir.summary import read_summary

Record = Mapping[str, float]
"""Record of a step: its number as `step`, and numbers by the names of metrics."""
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as it has written itself down."""

    name: str
    """Name that distinguishes the run from the others of a page."""
    folder: Path
    records: tuple[Record, ...]
    """All records, in the order of their steps."""
    config: Mapping[str, Any]
    """Settings as the run saved them; empty if they cannot be read."""
    summary: Mapping[str, Any]
    """Content of `summary.json`; empty until the run has ended."""
    remarks: tuple[str, ...]
    """What could not be read, in sentences."""

    @property
    def training(self) -> list[Record]:
        """Records of training steps, without those that only hold the last validation."""
        return [record for record in self.records if "time/step_s" in record]

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `unfinished` if it is still running or was killed."""
        if self.summary.get("steps", -1) < len(self.training):  # of an earlier session
            return "unfinished"
        return str(self.summary.get("status", "unfinished"))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, and name them by as much of their paths as distinguishes them.

    Raises:
        DataError: a folder is missing or holds no record, or is named twice.
    """
    places = [folder.absolute() for folder in folders]
    if len(set(places)) < len(places):
        raise DataError("a folder is named twice; name each run once")
    depth = 1
    while len({_tail(place, depth) for place in places}) < len(places):
        depth += 1
    return [read_run(place, _tail(place, depth)) for place in places]


def _tail(place: Path, depth: int) -> str:
    return "/".join(place.parts[-depth:])


def read_run(folder: Path, name: str) -> Run:
    """Read what a run has written into `folder`.

    Raises:
        DataError: the folder holds no record of a step.
    """
    path = folder / METRICS
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; name the output_dir of a run whose first step has ended"
        )
    remarks: list[str] = []
    records = parse_records(path.read_bytes(), remarks)
    if not records:
        raise DataError(f"{path} holds no complete record; wait until the first step has ended")
    summary: Mapping[str, Any] = {}
    try:
        summary = read_summary(folder) or {}
    except DataError as error:
        remarks.append(str(error))
    if not isinstance(summary.get("steps", 0), int):
        summary = {}
    return Run(name, folder, records, _config(folder, remarks), summary, tuple(remarks))


def parse_records(data: bytes, remarks: list[str]) -> tuple[Record, ...]:
    """Return the records in the content of a metrics.jsonl, in the order of their steps. The last
    record of a step counts.

    Args:
        data: content of the file. A last line without an end is still being written.
        remarks: gets a sentence if other lines hold no record.
    """
    *lines, _unfinished = data.decode(errors="replace").split("\n")
    found: dict[int, Record] = {}
    broken = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            broken.append(number)
            continue
        found[step] = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    if broken:
        remarks.append(
            f"{len(broken)} of {len(lines)} lines of {METRICS} hold no record, the first in line "
            f"{broken[0]}; they are left out"
        )
    return tuple(found[step] for step in sorted(found))


def _config(folder: Path, remarks: list[str]) -> Mapping[str, Any]:
    """Return the settings in `config.yaml`; an empty mapping, and a remark, if it has none."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        remarks.append(f"config.yaml cannot be read: {' '.join(str(error).split())}")
        return {}
    if not isinstance(found, dict):
        remarks.append(f"config.yaml should hold a mapping and holds {type(found).__name__}")
        return {}
    return found
