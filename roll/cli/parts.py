"""Commands that try the parts of a run by themselves: its rewards, an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roll.cli.shared import (
    EXIT_BROKEN,
    OUT,
    Debug,
    File,
    Overrides,
    leave_out_triton,
    reported,
)
from roll.config.loading.compose import load_config


def try_reward(
    file: File,
    overrides: Overrides = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows, or of lines of the responses.")
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(help="JSONL with `response` and the `id` of its row; such as a rollout."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="JSONL with the `label` of each response, true or false.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run the rewards of a run file on responses, without a policy: scores, parts, failures,
    latency, and confusion with labels. Without responses: on the rows' own answers, on those of
    other rows, and on empty ones."""
    with reported(debug):
        leave_out_triton()
        loaded = load_config(file, overrides or ())
        from roll.commands.preflight import user_folder
        from roll.commands.reward_try import report
        from roll.commands.reward_try.tries import try_rewards_on

        tries = try_rewards_on(
            loaded.config, user_folder(loaded), rows=rows, responses=responses, against=against
        )
        report.show(tries, OUT)
        if any(one.would_stop_a_run for one in tries):
            raise typer.Exit(EXIT_BROKEN)


def try_environment(
    env: Annotated[
        str,
        typer.Argument(
            help="A built-in environment, my_module:MyEnv, or gymnasium:FrozenLake-v1 and others.",
            metavar="NAME",
        ),
    ],
    kwargs: Annotated[str, typer.Option(help="Its keyword arguments, a JSON object.")] = "{}",
    adapter: Annotated[str, typer.Option(help="Settings of its adapter, a JSON object.")] = "{}",
    python: Annotated[
        str | None, typer.Option(help="Interpreter of its processes, where the package is.")
    ] = None,
    options: Annotated[str, typer.Option(help="Columns of a data row, a JSON object.")] = "{}",
    seeds: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Turns after which an episode ends.")] = 16,
    action: Annotated[
        list[str] | None, typer.Option(help="An action that the random policy writes, too.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Play an environment with an empty policy, a random one, and hostile actions: rewards, speed,
    and the rules that it breaks (the same answers for the same seed, no errors, closing)."""
    with reported(debug):
        from roll.commands.env_try import told_lines, trial_table, try_named

        trial = try_named(
            env,
            Path.cwd(),
            kwargs=kwargs,
            adapter=adapter,
            python=python,
            options=options,
            seeds=seeds,
            max_turns=turns,
            actions=action or (),
        )
        OUT.print(trial_table(trial))
        for line in told_lines(trial):
            OUT.print(f"  {line}", markup=False)
        for line in trial.broken:
            OUT.print(f"broken: {line}", markup=False, style="red")
        if trial.broken:
            raise typer.Exit(EXIT_BROKEN)
        OUT.print("ok: the same seed gives the same answers, and no action fails", style="green")
