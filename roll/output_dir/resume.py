"""The output folder of a run: what it holds from before, what is still missing in it."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, SettingsChangedError
from roll.output_dir.checkpoints import STATE, Checkpoints, RunState, load_state
from roll.output_dir.config_diff import changed_keys
from roll.output_dir.summary import read_summary, write_summary
from roll.output_dir.trackers import read_records

logger = logging.getLogger(__name__)

LOCK = "run.lock"
"""In a folder that a run is in; see `run_lock.py`."""

EXPORT_MARK = "roll.json"
"""In `hf/`: which step its weights are of."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins, and what an earlier one left undone there."""

    checkpoint: Path | None
    state: RunState | None
    recorded: bool
    """Whether the validation that the checkpoint carries is in metrics.jsonl."""
    exported: bool
    """Whether `hf/` holds the weights of the checkpoint."""

    @property
    def step(self) -> int:
        return self.state.step if self.state else 0


def find_start(config: RunConfig) -> Start:
    """What `resume` means in this folder.

    Raises:
        CheckpointError: it names no complete checkpoint.
    """
    folder = Path(config.output_dir)
    checkpoint = Checkpoints(folder / "checkpoints", config.checkpoint).find(config.resume)
    if checkpoint is None:
        return Start(None, None, recorded=True, exported=False)
    state = load_state(checkpoint)
    names: set[str] = set()
    for record in read_records(folder / "metrics.jsonl"):
        if record["step"] == state.step:
            names |= record.keys()
    recorded = not state.carried.keys() - names
    return Start(checkpoint, state, recorded, exported_step(folder) == state.step)


def rendering_moment(config: RunConfig) -> datetime:
    """What chat templates take for now: the moment of the checkpoint that the run goes on from, so
    that its rows are the same on every day; without one, now. Changes nothing in the folder.

    Raises:
        CheckpointError: the checkpoint is not of this version.
    """
    now = datetime.now()
    if config.resume == "never":
        return now
    if config.resume == "auto":
        folder = Path(config.output_dir).expanduser() / "checkpoints"
        complete = Checkpoints(folder, config.checkpoint).complete()
        checkpoint = complete[-1][1] if complete else None
    else:
        checkpoint = Path(config.resume)
    if checkpoint is None or not (checkpoint / STATE).is_file():
        return now
    rendered_at = load_state(checkpoint).rendered_at
    return datetime.fromisoformat(rendered_at) if rendered_at else now


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None when there is work.

    Raises:
        CheckpointError: as `find_start`.
    """
    start = find_start(config)
    if start.state is None or start.step < config.max_steps or not start.recorded:
        return None
    if config.checkpoint.export_hf and not start.exported:
        return None
    logger.info(
        "%s is complete (%d of %d steps); raise max_steps to go on, or set resume=never to start "
        "anew",
        config.output_dir,
        start.step,
        config.max_steps,
    )
    folder = Path(config.output_dir)
    earlier = read_summary(folder)
    if earlier is not None and earlier["status"] == "finished":
        return earlier
    return write_summary(folder, status="finished", wall_s=start.state.wall_s)


def refuse_other_settings(config: RunConfig) -> None:
    """Look whether the finished run in `output_dir` is the one that `config` asks for.

    Args:
        config: as the user wrote it.

    Raises:
        SettingsChangedError: it was trained with other settings; names them.
    """
    start = find_start(config)
    if start.checkpoint is None:
        return
    changed = changed_keys(start.checkpoint, config)
    if start.step > config.max_steps:
        changed.append(f"max_steps: {start.step} -> {config.max_steps}")
    if changed:
        what = "1 setting is" if len(changed) == 1 else f"{len(changed)} settings are"
        raise SettingsChangedError(
            f"{config.output_dir} is complete ({start.step} steps), but {what} not what this run "
            "asks for:\n  " + "\n  ".join(changed) + "\nIts results are those of the earlier "
            "settings. Give this run another output_dir; or set resume=never to start anew (what "
            "is there is kept beside it); or raise max_steps to go on from there with the new ones"
        )


def exported_file(model: ModelConfig) -> str:
    """What an export of this model holds in any case."""
    return "config.json" if model.lora is None else "adapter_config.json"


def mark_export(hf: Path, step: int) -> None:
    """Note in an exported model which step it is of."""
    (hf / EXPORT_MARK).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def exported_step(output_dir: Path) -> int | None:
    """The step whose weights `hf/` holds; None when there are none, or nobody knows."""
    mark = output_dir / "hf" / EXPORT_MARK
    if not mark.is_file():
        return None
    step: int = json.loads(mark.read_text(encoding="utf-8"))["step"]
    return step


def make_writable(output_dir: Path) -> None:
    """Create the folder and write into it once.

    Raises:
        ConfigError: it is a file, or cannot be created or written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir: {output_dir} cannot be written ({error.strerror}); give a folder that "
            "can be created, on a disk with room"
        ) from None


def set_aside(output_dir: Path) -> None:
    """`resume: never` begins in an empty folder; what is there is renamed, never deleted."""
    if not output_dir.is_dir() or {path.name for path in output_dir.iterdir()} <= {LOCK}:
        return
    number = 1
    while (aside := output_dir.with_name(f"{output_dir.name}.{number}")).exists():
        number += 1
    output_dir.rename(aside)
    (aside / LOCK).unlink(missing_ok=True)  # of the run that begins, not of the one that is kept
    logger.info("resume is never: the earlier run is kept in %s", aside)
