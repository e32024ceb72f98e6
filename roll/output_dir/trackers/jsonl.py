"""`metrics.jsonl`: the records of a run in its output folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from roll.output_dir.trackers.interface import Record
from roll.output_dir.whole_file import replace_file


class JsonlTracker:
    """Tracker that writes `metrics.jsonl`: one object per step, flushed before the next step
    begins."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open the file for appending, without the records from `first_step` on, which the run
        makes again."""
        _drop_records(path, first_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, record: Record) -> None:
        """Append the record of a step to the file, with the step in it, and flush."""
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_records(path: Path, first_step: int) -> None:
    """Remove the records from `first_step` on from the file, and an incomplete line.

    The new content is written to another file, which is then renamed. If nothing changes, nothing
    is written. If the disk is full, all records stay and OSError is raised.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = []
    for line in text.splitlines(keepends=True):
        with suppress(json.JSONDecodeError):
            if line.endswith("\n") and json.loads(line)["step"] < first_step:
                kept.append(line)
    remaining = "".join(kept)
    if remaining == text:
        return
    replace_file(path, remaining)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; lines that are incomplete because of a kill are left
    out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
