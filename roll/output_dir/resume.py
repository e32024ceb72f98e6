"""State of a run's output folder: what an earlier session left there, and what is still to do."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import (
    CheckpointError,
    ConfigError,
    SettingsChangedError,
    StoppedEarlyError,
)
from roll.output_dir.checkpoints import STATE, Checkpoints, RunState, load_state, restore_folder
from roll.output_dir.config_diff import changed_keys
from roll.output_dir.patience import Patience
from roll.output_dir.summary import read_summary, write_summary
from roll.output_dir.trackers import read_records

logger = logging.getLogger(__name__)

LOCK = "run.lock"
"""Name of the lock file in the folder of a run; see `run_lock.py`."""

EXPORT_MARK = "roll.json"
"""Name of the file in `hf/` that holds the step of the exported weights."""


@dataclass(frozen=True, slots=True)
class Start:
    """Point where a run begins, and what an earlier session left to do there."""

    checkpoint: Path | None
    state: RunState | None
    recorded: bool
    """True if the validation metrics that the checkpoint carries are in metrics.jsonl; False if
    their validation is still to do."""
    exported: bool
    """True if `hf/` holds the weights of the checkpoint."""

    @property
    def step(self) -> int:
        """Number of steps done before this session; 0 without a checkpoint."""
        return self.state.step if self.state else 0

    def ended_early(self, config: RunConfig) -> str | None:
        """Return why the run has ended before its last step; None if it has not."""
        if self.state is None or self.step >= config.max_steps:
            return None
        return Patience(config.validation.stop, self.state.patience).end


def find_start(config: RunConfig) -> Start:
    """Return the point where the run begins, according to `resume` and the output folder. Unless
    `resume` is never, `Checkpoints.tidy` changes the folder first; an export that a kill has left
    without its name gets it back.

    Raises:
        CheckpointError: `resume` names no complete checkpoint, or one of another version's format.
    """
    folder = Path(config.output_dir)
    restore_folder(folder / "hf")
    checkpoint = Checkpoints(folder / "checkpoints", config.checkpoint).find(config.resume)
    if checkpoint is None:
        return Start(None, None, recorded=True, exported=False)
    state = load_state(checkpoint)
    names: set[str] = set()
    for record in read_records(folder / "metrics.jsonl"):
        if record["step"] == state.step:
            names |= record.keys()
    recorded = state.carried is not None and not state.carried.keys() - names
    return Start(checkpoint, state, recorded, exported_step(folder) == state.step)


def check_optimizer(config: RunConfig) -> None:
    """Raise CheckpointError if the run would train on from a checkpoint without the state of its
    optimizers, and `checkpoint.restart_optimizer` does not ask for it. The folder is not changed.

    Raises:
        CheckpointError: so it is; or the checkpoint is not in the format of this version.
    """
    state = _state_to_resume(config)
    if state is None or state.optimizer or config.checkpoint.restart_optimizer:
        return
    if state.step >= config.max_steps or Patience(config.validation.stop, state.patience).end:
        return
    raise CheckpointError(
        f"the checkpoint of step {state.step} has no state of the optimizers (checkpoint.optimizer "
        "was false): their moments would begin anew, and the steps after it would not be those of "
        "an undisturbed run. Set checkpoint.restart_optimizer=true to go on so; or resume=PATH of "
        "a checkpoint that has them, or resume=never"
    )


def rendering_moment(config: RunConfig) -> datetime:
    """Return the date and time that chat templates treat as the present.

    This is the moment saved in the checkpoint that the run resumes from, so that rows stay the same
    on every day. Without a checkpoint it is the present. The folder is not changed.

    Raises:
        CheckpointError: the checkpoint is not in the format of this version.
    """
    state = _state_to_resume(config)
    if state is None or not state.rendered_at:
        return datetime.now()
    return datetime.fromisoformat(state.rendered_at)


def steps_left(config: RunConfig) -> range:
    """Return the steps from the checkpoint that the run resumes from to its last one. The folder is
    not changed.

    Raises:
        CheckpointError: the checkpoint is not in the format of this version.
    """
    state = _state_to_resume(config)
    return range(0 if state is None else state.step, config.max_steps)


def where_it_goes_on(config: RunConfig) -> str:
    """Return a sentence about how a run that ends now goes on next time, and which of the steps
    that were shown are done again.

    Raises:
        CheckpointError: the checkpoint is not in the format of this version.
    """
    first = steps_left(config.model_copy(update={"resume": "auto"})).start
    if not first:
        why = {"auto": "there is no checkpoint yet", "never": "resume: never"}
        told = why.get(config.resume, f"there is no checkpoint here yet; resume: {config.resume}")
        return f"the same command begins anew ({told})"
    shown = (
        record["step"]
        for record in read_records(Path(config.output_dir) / "metrics.jsonl")
        if "time/step_s" in record
    )
    again = sorted({step for step in shown if step >= first})
    told = f"{same_command(config)} goes on with step {first} of {config.max_steps}"
    told += ", from its last checkpoint"
    if not again:
        return told
    if len(again) == 1:
        return f"{told}; step {first} is done again"
    return f"{told}; steps {again[0]} to {again[-1]} are done again"


def stopped_early(config: RunConfig, done: int, reason: str) -> StoppedEarlyError:
    """Return the error of a run that was asked to end and has saved its steps.

    Args:
        done: number of steps that are done.
        reason: why it ends.
    """
    return StoppedEarlyError(
        f"{done} of {config.max_steps} steps are done and saved ({reason}); "
        f"{same_command(config)} goes on"
    )


def same_command(config: RunConfig) -> str:
    """Return the words "the same command", and what it must say otherwise to go on from the newest
    checkpoint of this run."""
    changes = [] if config.resume == "auto" else ["resume=auto"]
    if config.stop_at is not None and datetime.now().astimezone() >= config.stop_at.astimezone():
        changes.append("a later stop_at")
    return "the same command" + (f" with {' and '.join(changes)}" if changes else "")


def tell_resumption(start: Start, written: RunConfig) -> None:
    """Log the checkpoint that the run resumes from, and warn which settings of a config are not
    those of the checkpoint."""
    assert start.checkpoint is not None
    logger.info("resuming from %s, step %d of %d", start.checkpoint, start.step, written.max_steps)
    if start.state is not None and start.state.carried is None:
        logger.info("the validation of these %d steps is left to do, and comes first", start.step)
    if start.state is not None and not start.state.optimizer and start.step < written.max_steps:
        logger.warning("it has no state of the optimizers: they begin anew")
    changed = changed_keys(start.checkpoint, written)
    if changed:
        logger.warning(
            "%d settings are not those of the checkpoint:\n  %s",
            len(changed),
            "\n  ".join(changed),
        )


def _state_to_resume(config: RunConfig) -> RunState | None:
    """Return the state in the checkpoint that the run resumes from, without a change of the folder;
    None without a checkpoint."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        folder = Path(config.output_dir).expanduser() / "checkpoints"
        complete = Checkpoints(folder, config.checkpoint).complete()
        checkpoint = complete[-1][1] if complete else None
    else:
        checkpoint = Path(config.resume).expanduser()
    if checkpoint is None or not (checkpoint / STATE).is_file():
        return None
    return load_state(checkpoint)


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do, and write it if the file does not
    say `finished` yet; None if there is work.

    Raises:
        CheckpointError: see `find_start`.
    """
    start = find_start(config)
    if start.state is None or not start.recorded:
        return None
    ended = start.ended_early(config)
    if start.step < config.max_steps and ended is None:
        return None
    if config.checkpoint.export_hf and not start.exported:
        return None
    logger.info(
        "%s is complete (%d of %d steps%s); raise %s to go on, or set resume=never to start anew",
        config.output_dir,
        start.step,
        config.max_steps,
        "" if ended is None else f": {ended}",
        "max_steps" if start.step >= config.max_steps else "validation.stop.patience",
    )
    folder = Path(config.output_dir)
    earlier = read_summary(folder)
    if earlier is not None and earlier["status"] == "finished":
        return earlier
    return write_summary(folder, status="finished", wall_s=start.state.wall_s, ended_early=ended)


def refuse_other_settings(config: RunConfig) -> None:
    """Raise SettingsChangedError unless the finished run in `output_dir` has the settings of
    `config`.

    Args:
        config: the config as the user wrote it.

    Raises:
        SettingsChangedError: the run was trained with other settings, which the text names.
        CheckpointError: see `find_start` and `changed_keys`.
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
    """Return the name of a file that every export of this model holds."""
    return "config.json" if model.lora is None else "adapter_config.json"


def mark_export(hf: Path, step: int) -> None:
    """Record in an exported model's folder the step of its weights."""
    (hf / EXPORT_MARK).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def exported_step(output_dir: Path) -> int | None:
    """Return the step whose weights `hf/` holds; None if there is no export, or its step is
    unknown."""
    mark = output_dir / "hf" / EXPORT_MARK
    if not mark.is_file():
        return None
    step: int = json.loads(mark.read_text(encoding="utf-8"))["step"]
    return step


def make_writable(output_dir: Path) -> None:
    """Create the folder, and write a temporary file into it as a test.

    Raises:
        ConfigError: the path is a file, or the folder cannot be created or written.
    """
    with _told(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass


FIRST_BYTES = 1 << 16
"""Bytes for which the disk of a run must have room when it starts: its config and its lock."""


def check_writable(output_dir: Path) -> None:
    """Check that a run could create the folder and write into it; nothing stays behind.

    Raises:
        ConfigError: the path is a file, or the folder cannot be created or written.
    """
    with _told(output_dir):
        # Tried, since rights do not tell all: root may write everywhere, but not into /proc.
        place = next(path for path in (output_dir, *output_dir.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".roll-", dir=place) as tried:
            # A full disk often has room for a folder.
            (Path(tried) / "file").write_bytes(bytes(FIRST_BYTES))


@contextmanager
def _told(output_dir: Path) -> Iterator[None]:
    """Make a ConfigError of an error of the disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"output_dir: {output_dir} cannot be written ({error.strerror}); give a folder that "
            "can be created, on a disk with room"
        ) from None


def set_aside(output_dir: Path) -> None:
    """Rename a folder that holds more than a lock to `<name>.1`, or the next free number.

    Called for `resume: never`, which begins in an empty folder. Only the lock is deleted. Of a
    link, the folder that it leads to is renamed, and made again, so that the new run is on the same
    disk as the earlier one.

    Raises:
        ConfigError: the folder cannot be renamed.
    """
    if not output_dir.is_dir() or {path.name for path in output_dir.iterdir()} <= {LOCK}:
        return
    place = output_dir.resolve()
    number = 1
    while (aside := place.with_name(f"{place.name}.{number}")).exists():
        number += 1
    try:
        place.rename(aside)
        if output_dir.is_symlink():
            place.mkdir()
    except OSError as error:
        raise ConfigError(
            f"output_dir: resume: never renames {place} to {aside}, which failed "
            f"({error.strerror}); move what is in it by hand, or name another output_dir"
        ) from None
    (aside / LOCK).unlink(missing_ok=True)  # it belongs to the run that begins
    logger.info("resume is never: the earlier run is kept in %s", aside)
