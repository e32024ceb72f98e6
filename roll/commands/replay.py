"""`roll replay`: one step of a run again, from its checkpoint and the samples that it has kept."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.commands.launch import pipeline_class, started
from roll.config.loading.compose import load_config
from roll.config.loading.written import in_one_line
from roll.config.rlvr_base import RlvrBase
from roll.config.sections.lifecycle import CheckpointConfig
from roll.config.user_code.import_path import searched_first
from roll.core.errors import ConfigError, DataError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import Prompt
from roll.distributed.cluster import Launcher
from roll.distributed.processes.fork_server import ForkServer
from roll.output_dir.checkpoints import Checkpoints, load_state
from roll.output_dir.sample_files import sample_files
from roll.output_dir.trackers import read_records
from roll.platform.logs import setup_logging
from roll.runtime.rollouts.replay import load_replay
from roll.runtime.run_data import RunData

MEASURED = ("time/", "perf/", "memory/", "machine/", "gpu/")
"""Beginnings of the names of metrics that measure the machine."""


@dataclass(frozen=True)
class Again:
    """Steps of a run that are to be done again, the last of them to be looked at."""

    config: RlvrBase
    data: RunData[Prompt]
    checkpoint: Path | None
    """State before the first of these steps; None: the start of the run."""
    steps: range
    record: Mapping[str, float]
    """Metrics that the run has recorded of the last one."""

    @property
    def begins(self) -> str:
        """Name of the place where the steps begin, for people."""
        return "the start of the run" if self.checkpoint is None else str(self.checkpoint)


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of a step, as recorded and as computed again."""

    name: str
    then: float
    now: float

    @property
    def differs(self) -> bool:
        """True unless both are the same number to the bit, or both no number."""
        return self.then != self.now and not (math.isnan(self.then) and math.isnan(self.now))


def find_again(output_dir: Path, step: int, overrides: Sequence[str] = ()) -> Again:
    """Return what is to be done to do a step again.

    Args:
        output_dir: folder of the run.
        step: number of the step.
        overrides: `key.sub=value`, settings to be tried in place of the run's.

    Raises:
        ConfigError, DataError: the run has not done the step, or has not kept what it takes.
    """
    done = [one for one in read_records(output_dir / "metrics.jsonl") if "time/step_s" in one]
    records = {int(one["step"]): one for one in done}
    if step not in records:
        has = f"records of the steps {min(records)} to {max(records)}" if records else "none"
        raise DataError(
            f"--step {step}: {output_dir} has no record of it in metrics.jsonl ({has}); name the "
            "output_dir of a run, and a step that it has done"
        )
    complete = Checkpoints(output_dir / "checkpoints", CheckpointConfig()).complete()
    file = next((path for count, path in complete if count > step), output_dir) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{file} is missing, which says with which settings the step was done")
    with searched_first(Path.cwd()):  # where a run's own parts are
        made = load_config(file).config
    if not isinstance(made, RlvrBase):
        raise ConfigError(
            f"{output_dir} is a run of pipeline: {made.pipeline}, which has no samples to replay; "
            f"expected rlvr or agentic"
        )
    # Without their moments, optimizers would do other steps than the run did.
    before = {count: path for count, path in complete if count <= step}
    first = max((count for count, path in before.items() if load_state(path).optimizer), default=0)
    checkpoint = before.get(first)
    if checkpoint is None and made.resume not in ("auto", "never"):
        raise DataError(
            f"--step {step}: no checkpoint with the state of the optimizers at or before it is in "
            f"{output_dir}/checkpoints (complete: "
            f"{', '.join(str(count) for count, _ in complete) or 'none'}), and the run did not "
            f"begin at step 0 (resume: {made.resume}); checkpoint.every, keep_last and optimizer "
            "say what is kept"
        )
    config = _trained_again(file, overrides, _samples(output_dir, made))
    steps = range(first, step + 1)
    return Again(config, load_replay(config, steps, made), checkpoint, steps, records[step])


def _trained_again(file: Path, overrides: Sequence[str], samples: Path) -> RlvrBase:
    """Return the settings of a run as a replay has them: it trains on kept samples, and writes
    nothing; the errors are those of `load_config`."""
    forced = (
        f"rollout.replay={in_one_line(str(samples), quotes=True)}",
        "validation.sets=null",
        "validation.stop=null",
        "checkpoint.best_metric=null",
        "checkpoint.keep_best=0",
    )
    with searched_first(Path.cwd()):
        config = load_config(file, (*overrides, *forced)).config
    assert isinstance(config, RlvrBase)
    nowhere = Path(tempfile.gettempdir()) / "roll-replay-writes-nothing"
    return config.model_copy(
        update={
            "output_dir": str(nowhere),
            "profile": None,
            "track": config.track.model_copy(update={"samples": "none", "rollouts_every": None}),
        }
    )


def _samples(output_dir: Path, made: RlvrBase) -> Path:
    """Return the folder of the run whose samples this run has trained on; DataError if they were
    not kept."""
    if made.rollout.replay is not None:
        return Path(made.rollout.replay)
    if not sample_files(output_dir, "train"):
        raise DataError(
            f"{output_dir} has kept no samples of its steps, which a replay trains on again; runs "
            "with track.samples=all keep them"
        )
    return output_dir


def do_again(again: Again, launcher: Launcher, loop: LoopThread, platform: str) -> list[Line]:
    """Do the steps; return the metrics of the last one beside the recorded ones, without those that
    measure the machine."""
    make = pipeline_class(again.config.pipeline)
    pipeline = make(again.config, launcher, loop, platform=platform, data=again.data)
    pipeline.open()
    try:
        state = None if again.checkpoint is None else load_state(again.checkpoint)
        pipeline.restore(again.checkpoint, state)
        for step in again.steps:
            metrics = pipeline.step(step)
    finally:
        pipeline.close()
    now = metrics.values_by_name()
    return [
        Line(name, again.record[name], value)
        for name, value in sorted(now.items())
        if name in again.record and not name.startswith(MEASURED)
    ]


def replay(again: Again, fork_server: ForkServer | None) -> list[Line]:
    """Do the steps with workers of their own; see `do_again`."""
    setup_logging("driver")
    folder = Path.cwd()
    sys.path.insert(0, str(folder))  # where a run's own modules are, as its models
    with started(again.config, folder, fork_server) as (resources, loop):
        return do_again(again, resources, loop, resources.platform)
