"""`Session`: the time of a run, and what its summary says at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.output_dir.summary import FILE, write_summary

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One of the sessions of a run, which is all of it if it is never resumed."""

    output_dir: Path
    rows: Callable[[], list[dict[str, Any]]]
    """Function that returns what became of the rows of each source."""
    earlier_s: float = 0.0
    """Time of the sessions before, in seconds."""
    under_way: bool = False
    """True once the restore has succeeded; the files of an earlier session are replaced then."""
    failed_trackers: Sequence[str] = ()
    _begun: float = field(default_factory=time.perf_counter, init=False)

    def begin(self) -> None:
        """Count the time from now on."""
        self._begun = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Time spent on this run over all sessions up to now, in seconds."""
        return self.earlier_s + time.perf_counter() - self._begun

    def finish(self, ended_early: str | None) -> dict[str, Any]:
        """Write and return the summary of a run that is complete.

        Args:
            ended_early: why it ended before its last step; None if it did not.
        """
        return write_summary(
            self.output_dir,
            status="finished",
            wall_s=self.wall_s,
            ended_early=ended_early,
            failed_trackers=self.failed_trackers,
            rows=self.rows(),
        )

    def note_end(self, status: str, error: BaseException) -> None:
        """Write to summary.json how the run ended, if the disk allows it. If the session failed
        before training could begin, a summary of an earlier session stays as it is."""
        if not self.under_way and (self.output_dir / FILE).exists():
            return
        first_line = (str(error).splitlines() or [""])[0]
        try:
            write_summary(
                self.output_dir,
                status=status,
                wall_s=self.wall_s,
                error=f"{type(error).__name__}: {first_line}",
                failed_trackers=self.failed_trackers,
                rows=self.rows(),
            )
        except OSError as unwritable:
            logger.warning("summary.json could not be written: %s", unwritable)
