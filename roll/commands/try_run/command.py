"""The steps of `roll try`, from a run file to a verdict."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roll.commands.preflight import inspect, user_folder
from roll.commands.preloads import forking
from roll.commands.trials.trial import try_out
from roll.commands.try_run.small_run import SmallRun, small_run
from roll.config.loading.compose import LoadedConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import UserError
from roll.report.samples import read_samples

SHOWN = 400
"""Largest number of characters of a text that is printed."""


def try_run(
    loaded: LoadedConfig,
    say: Callable[[str], None],
    *,
    steps: int,
    keep: Path | None,
    own_engine: bool,
) -> None:
    """Do a few tiny steps of a run, and say how it went.

    Args:
        say: prints a line.
        steps: number of steps.
        keep: folder for the small run's output and models; None: one that is removed.
        own_engine: generate with the engine that the run names, not with `hf`.

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
        with forking(small.config) as fork_server:
            from roll.commands.launch import launch

            launch(replace(loaded, config=small.config), fork_server=fork_server)
        for line in _first_sample(folder / "out"):
            say(line)
        gone = " (its folder is removed; --keep FOLDER keeps it)" if keep is None else ""
        say(f"ok: {steps} steps in {time.monotonic() - begun_s:.0f} s{gone}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


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
    """Return prompt, response and reward of the first sample as lines; empty if a run keeps
    none."""
    kept = read_samples(output_dir, [])
    rows = next((rows for rows in kept.values() if rows), None)
    if rows is None:
        return []
    row = rows[0]
    return [
        f"the first sample: {row.id}",
        f"  prompt    {_brief(row.prompt)}",
        f"  response  {_brief(row.response)}",
        f"  answer    {_brief(row.answer)}",
        f"  reward    {row.reward} {dict(row.parts) or ''}",
    ]


def _brief(text: str) -> str:
    """Return a text with its control characters escaped, and at most `SHOWN` characters of its
    end."""
    shown = json.dumps(text, ensure_ascii=False)
    return shown if len(shown) <= SHOWN else f"...{shown[-SHOWN:]}"
