"""What a session of a run leaves in the folder of earlier ones. The pipeline does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from roll.config import load_config
from roll.config.offline import SftConfig
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError
from roll.core.metrics import Metrics
from roll.core.threads.loop_thread import LoopThread
from roll.core.timing import Timers
from roll.distributed.cluster import Cluster
from roll.distributed.local import LocalLauncher
from roll.output_dir.checkpoints import RunState
from roll.output_dir.summary import read_summary, write_summary
from roll.pipeline.base import Pipeline
from roll.pipeline.profiling import StepProfiler
from tests.runs import write_rows_task


class KillError(BaseException):
    """Stands for the end of the process: nothing of the run is done afterwards."""


class Idle(Pipeline[SftConfig]):
    """A pipeline without clusters, whose first step does not come back."""

    config_class = SftConfig
    refuses = False

    @classmethod
    def prepare(cls, config: SftConfig) -> tuple[SftConfig, Any]:
        return config, None

    def open(self) -> None:
        """Start nothing."""

    def close(self) -> None:
        """Stop nothing."""

    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        if self.refuses:
            raise CheckpointError("not this one")

    def step(self, step: int) -> Metrics:
        raise KillError

    def validate(self, step: int) -> dict[str, float]:
        return {}

    def learners(self) -> dict[Role, Cluster[Any]]:
        return {}

    def exclusive_devices(self, role: Role) -> AbstractContextManager[None]:
        return nullcontext()

    def sampler_state(self) -> dict[str, Any]:
        return {}


@contextmanager
def idle(config: RunConfig) -> Iterator[Idle]:
    """A pipeline in this process."""
    assert isinstance(config, SftConfig)
    loop = LoopThread("test")
    try:
        yield Idle(config, LocalLauncher(), loop, platform="cpu", data=None)
    finally:
        loop.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_the_summary_of_an_earlier_session_is_there_until_the_next_one_does_steps(
    tmp_path: Path, refuses: bool
) -> None:
    rows = [{"prompt": "1", "completion": "2"}]
    config = load_config(write_rows_task(tmp_path, "sft", {"train": rows})).config
    out = Path(config.output_dir)
    out.mkdir()
    write_summary(out, status="failed", wall_s=1.0, error="of the earlier session")
    with idle(config) as run:
        run.refuses = refuses
        with pytest.raises(CheckpointError if refuses else KillError):
            run.run()
    assert (read_summary(out) is None) is not refuses


def test_a_recording_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1", "completion": "2"}]
    path = write_rows_task(tmp_path, "sft", {"train": rows}, profile={"steps": [0]})
    config = load_config(path).config
    with idle(config) as run:
        (tmp_path / "file").write_text("")  # no folder can be made below it
        profiler = StepProfiler(config, run.launcher, tmp_path / "file", "cpu")
        with profiler.step(0, Timers()):
            pass
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"step 0 is not recorded in {tmp_path / 'file' / 'step_000000'}: ")
