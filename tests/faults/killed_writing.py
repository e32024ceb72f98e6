"""A run that is killed while its second checkpoint is written beside the steps:
`python -m tests.faults.killed_writing RUN_YAML`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from roll.core.metrics import Metrics
from roll.pipeline.rlvr import RlvrPipeline
from tests.runs import run_local

SECOND = ".writing_step_000002"


class Killed(RlvrPipeline):
    """Nobody reads the pipe in the place of a file, so the write of the second checkpoint waits."""

    def save(self, folder: Path) -> None:
        if folder.name == SECOND:
            (folder / "actor_train").mkdir()
            os.mkfifo(folder / "actor_train/rng_00000.json")
        super().save(folder)

    def step(self, step: int) -> Metrics:
        metrics = super().step(step)
        if (self.checkpoints.folder / SECOND).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests, to whose numbers these are compared
    run_local(Path(sys.argv[1]), pipeline=Killed)
