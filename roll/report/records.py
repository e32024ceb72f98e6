"""`RecordReader`: the records of a metrics.jsonl, also of one that grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

Record = Mapping[str, float]
"""Record of a step: its number as `step`, and numbers by the names of metrics."""
METRICS = "metrics.jsonl"


class RecordReader:
    """Reader of a metrics.jsonl. Each reading takes what is new in the file, so that a long run can
    be followed; a file that was replaced or cut, as by a run that resumes, is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._size = -1, 0
        """File that was read, and the bytes of it that were."""
        self.written_s = 0.0
        """Time at which the file was written, as of the last reading, in seconds since 1970."""
        self._lines = 0
        self._found: dict[int, Record] = {}
        self._broken: list[int] = []
        """Numbers of the lines that hold no record."""

    @property
    def remark(self) -> str | None:
        """Sentence about lines that hold no record; None if all do."""
        if not self._broken:
            return None
        return (
            f"{len(self._broken)} of {self._lines} lines of {self.path.name} hold no record, the "
            f"first in line {self._broken[0]}; they are left out"
        )

    def read(self) -> tuple[Record, ...]:
        """Return all records of the file, in the order of their steps. The last record of a step
        counts; a last line without an end is still being written, and is left out.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._size:
                self._forget()
                self._inode = state.st_ino
            self.written_s = state.st_mtime
            file.seek(self._size)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._size += len(whole)
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            self._take(line)
        return tuple(self._found[step] for step in sorted(self._found))

    def _forget(self) -> None:
        """Begin at the first line again."""
        self._size = self._lines = 0
        self._found, self._broken = {}, []

    def _take(self, line: str) -> None:
        """Add the record of a line, or note that it holds none."""
        self._lines += 1
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            self._broken.append(self._lines)
            return
        self._found[step] = {
            name: value
            for name, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
