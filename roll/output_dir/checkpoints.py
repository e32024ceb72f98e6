"""Checkpoints of a run, which are complete or absent; the newest and the best ones are kept.

`checkpoints/step_000010/` holds the state after 10 steps. It is written as `.writing_step_000010`
and renamed when everything is on disk, so a killed run leaves nothing that looks complete.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import CheckpointError, ConfigError
from roll.output_dir.plain_json import read_arrays, write_plain

logger = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


def is_named_as_one(path: Path) -> bool:
    """Return whether a path has the name of a checkpoint, as a run gives it."""
    return _NAME.fullmatch(path.name) is not None


@dataclass(frozen=True, slots=True)
class RunState:
    """State that the driver saves in a checkpoint; the workers save their own."""

    step: int
    """Number of steps done."""
    sampler: dict[str, Any]
    """State of the sampler: its position in the data, and the samples that wait. After
    `load_state`, objects that stand for arrays; see `load_sampler`."""
    carried: dict[str, float] | None = field(default_factory=dict)
    """Validation metrics of this step, to be reported with the next record; None if the validation
    failed, so that it is still to do."""
    wall_s: float = 0.0
    """Time spent on the steps so far, over all sessions of the run, in seconds."""
    rendered_at: str = ""
    """Date and time that chat templates treat as the present, ISO 8601, local time; the same in all
    sessions of the run."""
    patience: dict[str, Any] = field(default_factory=dict)
    """`Patience.state` after the last validation; empty without `validation.stop`."""
    optimizer: bool = True
    """True if the state of the optimizers is in the checkpoint."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is not complete yet."""

    folder: Path
    """Folder to write into."""
    final: Path
    """Name that the folder gets when it is complete."""

    def discard(self) -> None:
        """Delete it."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        """Change nothing on disk; `folder` is `checkpoints/` in the run's folder, and may not exist
        yet."""
        self.folder = folder
        self.config = config
        self.held: Callable[[], frozenset[Path]] = frozenset
        """Function that returns checkpoints that must not be deleted yet."""

    @contextmanager
    def drafted(self, state: RunState) -> Iterator[Draft]:
        """Open a folder for a new checkpoint. When the block ends without an error, the state of
        the driver is in it, and the caller goes on to `complete_draft`.

        The state is written in a thread during the block, in which the workers save theirs. No
        other checkpoint may be a draft.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tidy()
        name = f"step_{state.step:06d}"
        draft = Draft(self.folder / f".writing_{name}", self.folder / name)
        draft.folder.mkdir()
        values = {each.name: getattr(state, each.name) for each in fields(state)}
        try:
            with ThreadPoolExecutor(1, "state") as beside:
                written = beside.submit(write_plain, draft.folder / STATE, values)
                yield draft
                written.result()
        except BaseException:
            draft.discard()
            raise

    def complete_draft(self, draft: Draft) -> None:
        """Give a checkpoint its name when all of it is on the disk, and delete those that need not
        be kept. After an error it is deleted."""
        try:
            _flush(draft.folder)
        except BaseException:
            draft.discard()
            raise
        if draft.final.exists():  # a later run with `resume: never` writes the same step again
            draft.final.rename(self.folder / f".old_{draft.final.name}")
        draft.folder.rename(draft.final)
        _sync(self.folder)
        self._prune(written=int(draft.final.name.removeprefix("step_")))

    def tidy(self) -> None:
        """Clean up after a kill: delete incomplete folders, and restore a folder that was to be
        replaced but has no replacement."""
        for torn in self.folder.glob(".writing_step_*"):
            shutil.rmtree(torn)
        for old in self.folder.glob(".old_step_*"):
            final = self.folder / old.name.removeprefix(".old_")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)

    def abandon_newer(self, step: int) -> None:
        """Rename the checkpoints after `step`: the run that continues from there will write other
        ones."""
        for newer, path in self.complete():
            if newer <= step:
                continue
            aside = path.with_name(f"abandoned_{path.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"abandoned_{path.name}.{number}")
            path.rename(aside)
            logger.warning("going on from step %d: %s is now %s", step, path.name, aside)

    def complete(self) -> list[tuple[int, Path]]:
        """Return (steps done, folder) of every complete checkpoint, oldest first."""
        found = []
        for path in self.folder.glob("step_*"):
            match = _NAME.fullmatch(path.name)
            if match and (path / STATE).is_file():
                found.append((int(match[1]), path))
        return sorted(found)

    def told_of_missing(self, path: Path) -> str:
        """Return that `path` is no complete checkpoint, and the steps of those that are here."""
        why = f"{STATE} is missing" if path.is_dir() else "there is no such folder"
        known = ", ".join(str(step) for step, _ in self.complete()) or "none"
        return (
            f"{path} is no complete checkpoint ({why}); complete in {self.folder}: {known}; "
            "checkpoint.keep_last of the run says how many stay"
        )

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint that `resume` (auto, never, or a path) selects; None if there is
        none to resume from. Call `tidy` first, except for `never`.

        Raises:
            CheckpointError: the path is no complete checkpoint.
        """
        if resume == "never":
            return None
        self.tidy()
        if resume == "auto":
            complete = self.complete()
            return complete[-1][1] if complete else None
        path = Path(resume).expanduser()
        if not (path / STATE).is_file():
            raise CheckpointError(f"resume: {self.told_of_missing(path)}")
        return path

    def _prune(self, *, written: int) -> None:
        """Delete checkpoints except the newest `keep_last`, the best `keep_best`, and always
        `written`."""
        complete = self.complete()
        keep = {step for step, _ in complete[-self.config.keep_last :]} | {written}
        metric = self.config.best_metric
        if metric is not None and self.config.keep_best:
            states = [load_state(path) for _, path in complete]
            values = [((s.carried or {}).get(metric, math.nan), s.step) for s in states]
            # NaN and infinite values cannot be ranked.
            scored = [(value, step) for value, step in values if math.isfinite(value)]
            # Of equal values the newer one is kept.
            scored.sort(key=lambda it: (it[0] if self.config.prefers_high else -it[0], it[1]))
            keep |= {step for _, step in scored[-self.config.keep_best :]}
        held = self.held()
        for step, path in complete:
            if step not in keep and path not in held:
                # Renamed first, so that a kill during the deletion leaves nothing that looks
                # complete.
                doomed = path.with_name(f".writing_{path.name}")
                path.rename(doomed)
                shutil.rmtree(doomed)
        self.tidy()


def load_state(path: Path) -> RunState:
    """Read the driver's state from a complete checkpoint.

    Raises:
        CheckpointError: the file is not in the format of this version.
    """
    try:
        return RunState(**json.loads((path / STATE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / STATE}: not a checkpoint of this version: {error}"
        ) from None


def load_sampler(path: Path, state: RunState) -> dict[str, Any]:
    """Return the sampler's state with its arrays, which `load_state` leaves out: they may hold
    millions of tokens.

    Args:
        path: folder of the complete checkpoint.
        state: what `load_state` returned.

    Raises:
        CheckpointError: the arrays are missing or damaged.
    """
    try:
        found = read_arrays(state.sampler, path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the waiting samples cannot be read: {error}") from None
    assert isinstance(found, dict)
    return found


def checkpoint_of(source: Path) -> Path:
    """Return `source` itself if it is a checkpoint, else the last complete one of the run in it;
    CheckpointError without one."""
    if (source / STATE).is_file():
        return source
    if is_named_as_one(source):
        beside = Checkpoints(source.parent, CheckpointConfig())
        raise CheckpointError(beside.told_of_missing(source))
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is no folder; name a checkpoint or the output_dir of a run"
        )
    folder = source / "checkpoints"
    complete = Checkpoints(folder, CheckpointConfig()).complete()
    if not complete:
        raise CheckpointError(
            f"{source} is no complete checkpoint ({STATE} is missing), and no run with one "
            f"({folder} holds none)"
        )
    return complete[-1][1]


def require_free(target: Path) -> None:
    """Raise ConfigError if a folder that is to be written exists."""
    if target.exists():
        raise ConfigError(f"{target} exists; name a folder that does not, or remove it")


def require_written(file: Path) -> None:
    """Raise CheckpointError unless a file that a worker wrote is visible on the driver.

    Raises:
        CheckpointError: the file is missing here, so `output_dir` is another folder on the worker's
            node.
    """
    if not file.is_file():
        raise CheckpointError(
            f"a worker has written {file}, but it is not here; output_dir must be a folder that "
            "all nodes share"
        )


def _flush(folder: Path) -> None:
    """Force every file below `folder` to disk, so that a later rename of the folder never comes
    before its content."""
    for root, _, files in os.walk(folder):
        for name in [*files, "."]:
            _sync(os.path.join(root, name))


def _sync(path: str | Path) -> None:
    """Force to disk the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_folder(final: Path, write: Callable[[Path], object]) -> None:
    """Fill a temporary folder beside `final`, then put it in the place of `final`. If `final` is a
    link, that is done where the link leads to, which may be another disk.

    Args:
        write: function that fills the folder whose path it gets. If it raises, `final` stays as it
            was, and the temporary folder is removed. After a kill `final` is whole, or
            `restore_folder` makes it so.
    """
    final = final.resolve()
    restore_folder(final)
    aside = final.with_name(f".writing_{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write(aside)
        _flush(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    old = _old(final)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(final: Path) -> None:
    """Clean up after a kill in `write_folder`: give a folder its name back that was to be replaced
    but has no replacement, or delete it if it has one."""
    final = final.resolve()
    old = _old(final)
    if not old.is_dir():
        return
    if final.exists():
        shutil.rmtree(old)
    else:
        old.rename(final)


def _old(final: Path) -> Path:
    """Return the name of a folder while another one takes its place."""
    return final.with_name(f".old_{final.name}")
