"""Interface of trackers, and what they are told of the run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.output_dir.whole_file import replace_file

Record = Mapping[str, float]
"""Name of a metric -> its value in one step."""


class Tracker(Protocol):
    """Receiver of one record per step."""

    def log(self, step: int, record: Record) -> None:
        """Store the metrics of one step, by name; may raise."""
        ...

    def close(self) -> None:
        """Finish; nothing is logged afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run, as a tracker is told of it."""

    folder: Path
    """Folder of the tracker, `OUTPUT_DIR/trackers/NAME`; it exists, and outlives the session."""
    project: str
    """Name of the project to which the run belongs."""
    name: str
    """Name of the run."""
    config: Mapping[str, Any]
    """All settings of the run, as in `config.yaml`."""
    first_step: int
    """Step with which this session begins. An earlier session may have logged it, and later
    ones."""

    def recall(self) -> str | None:
        """Return the text that an earlier session of the run gave to `remember`; None in the first
        session."""
        file = self.folder / "id"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def remember(self, text: str) -> None:
        """Keep a text for later sessions, such as the id of the run at a service."""
        replace_file(self.folder / "id", text)

    def own_id(self) -> str:
        """Return an id of 12 hexadecimal digits, the same in all sessions of the run."""
        found = self.recall()
        if found is None:
            found = uuid.uuid4().hex[:12]
            self.remember(found)
        return found
