"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.output_dir.trackers.interface import Record


class TensorBoardTracker:
    """Tracker that writes event files for TensorBoard."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Open new event files in `folder`; TensorBoard then hides earlier values from `first_step`
        on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
