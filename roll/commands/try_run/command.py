"""The steps of `roll try`, from a run file to a verdict."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roll.commands.preflight import inspect, user_folder
from roll.commands.preloads import forking
from roll.commands.samples.find import Question, find_samples
from roll.commands.samples.show import lines_of
from roll.commands.trials.trial import try_out
from roll.commands.try_run.small_run import SmallRun, small_run
from roll.config.loading.compose import LoadedConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import DataError, UserError


def try_run(
    loaded: LoadedConfig,
    say: Callable[[str], None],
    *,
    steps: int,
    keep: Path | None,
    own_engine: bool,
    run: Callable[[LoadedConfig], object] | None = None,
) -> None:
    """Do a few tiny steps of a run, and say how it went.

    Args:
        say: prints a line.
        steps: number of steps.
        keep: folder for the small run's output and models; None: one that is removed.
        own_engine: generate with the engine that the run names, not with `hf`.
        run: function that does a run; None: as `roll run`.

    Raises:
        UserError: what is wrong in the file, its data, rewards or templates.
        RollError: a step failed; the error names what was under way.
    """
    begun_s = time.monotonic()
    wrong = [str(finding.error) for finding in inspect(loaded) if not finding.only_here]
    if not wrong:
        wrong = [str(error) for error in try_out(loaded.config, user_folder(loaded)).wrong]
    if wrong:
        raise UserError("\n".join(wrong))
    folder = keep or Path(tempfile.mkdtemp(prefix="roll-try-"))
    try:
        small = _make(loaded, folder, steps=steps, own_engine=own_engine)
        say(f"{steps} tiny steps with small random models; not tried: {_untried(small)}")
        (run or _launched)(replace(loaded, config=small.config))
        for line in _first_sample(folder / "out"):
            say(line)
        kept = "" if keep is None else f"; output and models are in {folder}/"
        say(f"ok: {steps} steps in {time.monotonic() - begun_s:.0f} s{kept}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
            say(f"{folder} is removed; --keep FOLDER keeps it")


def _launched(loaded: LoadedConfig) -> None:
    """Do a run as `roll run` does it."""
    with forking(loaded.config) as fork_server:
        from roll.commands.launch import launch

        launch(loaded, fork_server=fork_server)


def _make(loaded: LoadedConfig, folder: Path, *, steps: int, own_engine: bool) -> SmallRun:
    """Write the small models and return the small run."""
    from roll.models.shrunken import write_shrunken

    made: dict[str, Path] = {}

    def shrink(model: ModelConfig) -> Path:
        key = f"{model.path} {model.tokenizer}"
        if key not in made:
            made[key] = folder / "models" / str(len(made))
            made[key].mkdir(parents=True, exist_ok=True)
            write_shrunken(model, made[key])
        return made[key]

    return small_run(loaded.config, folder / "out", shrink, steps=steps, own_engine=own_engine)


def _untried(small: SmallRun) -> str:
    """Return what the small run leaves out, as a text."""
    return ", ".join([*small.told, "weights, devices and layouts of the run"])


def _first_sample(output_dir: Path) -> list[str]:
    """Return the first sample of the small run as lines; empty if its pipeline generates none."""
    try:
        found = find_samples(output_dir, Question(limit=1)).rows
    except DataError:
        return []
    return [line for row in found for line, _ in lines_of(row, full=False)]
