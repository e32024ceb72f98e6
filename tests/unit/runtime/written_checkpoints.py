"""Checkpoints that tests write without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll.output_dir.checkpoints import Checkpoints, RunState


@contextmanager
def writing(checkpoints: Checkpoints, state: RunState) -> Iterator[Path]:
    """Open a folder for a checkpoint, which is complete when the block ends without an error."""
    with checkpoints.drafted(state) as draft:
        yield draft.folder
    checkpoints.complete_draft(draft)
