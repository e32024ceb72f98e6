"""`roll env try`: an environment played by policies that know nothing, without a run file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from roll.config.errors import ConfigError
from roll.config.sections.environment import EnvironmentConfig
from roll.envs.contract import try_env
from roll.envs.loading import load_env
from roll.envs.trial import EnvTrial, Episode


def try_named(
    env: str,
    folder: Path,
    *,
    kwargs: str = "{}",
    adapter: str = "{}",
    python: str | None = None,
    options: str = "{}",
    seeds: int = 5,
    max_turns: int = 16,
    actions: Sequence[str] = (),
) -> EnvTrial:
    """Try an environment by its name.

    Args:
        env: name of a built-in environment, of one with an adapter, or `package.module:Class`.
        folder: folder of the user's modules.
        kwargs: keyword arguments of the environment, a JSON object.
        adapter: settings of its adapter, a JSON object.
        python: interpreter of its processes; None for roll's own.
        options: columns of a data row for `reset`, a JSON object.
        seeds: number of tasks.
        max_turns: number of turns after which an episode is left.
        actions: see `try_env`.

    Raises:
        ConfigError: there is no such environment, or it does not take these arguments.
    """
    sys.path.insert(0, str(folder))
    try:
        config = EnvironmentConfig(
            env=env,
            kwargs=_object("--kwargs", kwargs),
            adapter=_object("--adapter", adapter),
            python=python,
        )
        make = load_env(env, config)
        row = _object("--options", options)
        return try_env(make, seeds=range(seeds), options=row, max_turns=max_turns, actions=actions)
    finally:
        sys.path.remove(str(folder))


def _object(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object that an option holds as text; ConfigError, which names the option, if
    the text is none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{option}: expected a JSON object such as {{"size": 4}}, found {text}')
    return found


def trial_table(trial: EnvTrial) -> Table:
    """Return a table with a line for each policy that played an episode without an error.

    Its columns are mean number of turns, mean reward with its range, mean success, share of
    episodes that ended before the turn limit, median times of `reset` (with making the
    environment) and `step`, and time of the slowest step.
    """
    columns = ("turns", "reward", "success", "ended", "reset", "step", "slowest")
    table = Table("policy", *columns, box=SIMPLE, pad_edge=False)
    for name, episodes in trial.episodes.items():
        if episodes:
            table.add_row(*map(Text, (name, *_figures(episodes))))
    return table


def _figures(episodes: Sequence[Episode]) -> list[str]:
    """Return the cells of a policy's line, without its name, in the order of `trial_table`."""
    rewards = [one.reward for one in episodes]
    told = [one.success for one in episodes if one.success is not None]
    steps_s = [each for one in episodes for each in one.step_s] or [0.0]
    resets_s = [one.reset_s for one in episodes]
    ended = fmean(bool(one.turns and one.turns[-1].over) for one in episodes)
    return [
        f"{fmean(len(one.turns) for one in episodes):.3g}",
        f"{fmean(rewards):.3g} ({min(rewards):.3g} to {max(rewards):.3g})",
        f"{fmean(told):.0%}" if told else "-",
        f"{ended:.0%}",
        *map(_time, (median(resets_s), median(steps_s), max(steps_s))),
    ]


def _time(seconds: float) -> str:
    """Return a duration as text, in us, ms or s."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def told_lines(trial: EnvTrial) -> list[str]:
    """Return remarks about what is no mistake, but is seldom meant."""
    lines = [f"{trial.tasks} different first observations for {trial.seeds} seeds"]
    played = [one for episodes in trial.episodes.values() for one in episodes if one.turns]
    if played and all(one.success is None for one in played):
        lines.append("`info` has no `success`; metrics will show rewards alone")
    if played and all("state" not in turn.info for one in played for turn in one.turns):
        lines.append("`info` has no `state`, which GiGPO needs")
    return lines
