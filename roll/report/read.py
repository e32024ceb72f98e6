"""`Run`: what a run has written into its folder so far. A folder that is damaged, or still being
written, is read as far as it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.config.loading.written import without_marks
from roll.core.errors import DataError
from roll.output_dir.summary import read_summary
from roll.report.records import METRICS, Record, RecordReader

_MANY = 8
"""Number of runs that a message names."""


class NothingYetError(DataError):
    """A folder without a record of a step."""


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
    written_s: float = 0.0
    """Time at which the last record was written, in seconds since 1970."""
    state: str | None = None
    """What is known of its process while it goes on: `running` or `silent`; None: nothing."""

    @property
    def done(self) -> int:
        """Number of steps that are done, those of the run that it continues from included."""
        return int(self.training[-1]["step"]) + 1 if self.training else 0

    @property
    def training(self) -> list[Record]:
        """Records of training steps, without those that only hold the last validation."""
        return [record for record in self.records if "time/step_s" in record]

    @property
    def status(self) -> str:
        """`state`, if it is known; else `finished`, `stopped` or `failed`, or `unfinished` if it is
        still running or was killed."""
        if self.state is not None:
            return self.state
        if self.summary.get("steps", -1) < len(self.training):  # of an earlier session
            return "unfinished"
        return str(self.summary.get("status", "unfinished"))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, and name them by as much of their paths as distinguishes them.

    Raises:
        DataError: a folder is missing or holds no record, or is named twice.
    """
    places = [folder.absolute() for folder in folders]
    if len({place.resolve() for place in places}) < len(places):
        raise DataError("a folder is named twice; name each run once")
    depth = 1
    while len({_tail(place, depth) for place in places}) < len(places):
        depth += 1
    return [read_run(place, _tail(place, depth)) for place in places]


def _tail(place: Path, depth: int) -> str:
    return "/".join(place.parts[-depth:])


def read_run(folder: Path, name: str, reader: RecordReader | None = None) -> Run:
    """Read what a run has written into `folder`.

    Args:
        reader: of the folder's records, if they were read before.

    Raises:
        NothingYetError: the folder holds no record of a step.
    """
    reader = reader or RecordReader(folder / METRICS)
    try:
        records = reader.read()
    except (FileNotFoundError, NotADirectoryError):
        raise NothingYetError(told_of_no_run(folder)) from None
    if not records:
        raise NothingYetError(
            f"{reader.path} holds no complete record; wait until the first step has ended"
        )
    remarks = [] if reader.remark is None else [reader.remark]
    summary: Mapping[str, Any] = {}
    try:
        summary = read_summary(folder) or {}
    except DataError as error:
        remarks.append(str(error))
    if not isinstance(summary.get("steps", 0), int):
        summary = {}
    settings = _config(folder, remarks)
    return Run(name, folder, records, settings, summary, tuple(remarks), reader.written_s)


def told_of_no_run(folder: Path) -> str:
    """Return that a folder holds no run, and the runs that lie in it, or beside it if there is no
    such folder."""
    is_one = folder.is_dir()
    what = f"holds no run yet ({METRICS} is missing)" if is_one else "is no folder"
    told = f"{folder} {what}; name the output_dir of a run whose first step has ended"
    place = folder if is_one else folder.parent
    if found := runs_in(place):
        named = ", ".join(found[:_MANY])
        more = f" and {len(found) - _MANY} more" if len(found) > _MANY else ""
        told += f"; runs in {place}: {named}{more}"
    return told


def runs_in(folder: Path) -> list[str]:
    """Return the folders of runs in a folder and in those below it, relative to it."""
    found = [path.parent for form in ("*", "*/*") for path in folder.glob(f"{form}/{METRICS}")]
    return sorted(str(path.relative_to(folder)) for path in found)


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
    return {key: without_marks(value) for key, value in found.items()}
