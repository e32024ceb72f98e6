"""Commands on run files: run, rollout, check, try, show, migrate."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from roll.cli.shared import (
    ERR,
    EXIT_USER,
    OUT,
    Debug,
    File,
    Overrides,
    leave_out_triton,
    report_error,
    reported,
    told_if_slow,
)
from roll.config.errors import UserError
from roll.config.loading.compose import LoadedConfig, load_config
from roll.config.loading.written import run_file_text

if TYPE_CHECKING:
    from roll.commands.costs.report import Costs

Fast = Annotated[
    bool, typer.Option("--fast", help="Try nothing out: a second, and no data is tokenized.")
]
Rates = Annotated[
    str, typer.Option(help="Tokens per second of all devices: generate=3000,train=9000,score=20000")
]
Earlier = Annotated[
    Path | None,
    typer.Option("--from", help="The output_dir of an earlier run, with its rates and lengths."),
]
Expect = Annotated[
    str, typer.Option(help="Mean tokens of a prompt and a response: prompt=200,response=600")
]
Price = Annotated[float | None, typer.Option(min=0, help="Price of a device for an hour.")]


def run(file: File, overrides: Overrides = None, debug: Debug = False) -> None:
    """Run a pipeline; continue from the newest checkpoint in its output_dir."""
    with reported(debug):
        leave_out_triton()  # first: parts that users bring may import torch
        loaded = load_config(file, overrides or ())
        from roll.commands.preloads import forking

        # Comes first, so that the fork server imports what workers need while this process imports.
        with forking(loaded.config) as fork_server:
            from roll.commands.preflight import inspect

            for finding in inspect(loaded):
                raise finding.error
            from roll.commands.launch import launch, print_end

            print_end(loaded.config, launch(loaded, fork_server=fork_server))
            ERR.print(told_of_report(loaded.config.output_dir), markup=False)


def told_of_report(output_dir: str) -> str:
    """Return a line with the command that makes a page of a run; a shell expands no quoted `~`."""
    folder = shlex.quote(str(Path(output_dir).expanduser()))
    return f"roll report {folder} makes a page of it"


def rollout(
    file: File,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of steps; else max_steps of the file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; else output_dir with '-rollout'.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Generate and score the samples of a run without training, and keep them (docs/replay.md)."""
    with reported(debug):
        loaded = load_config(file, overrides or ())
        leave_out_triton()
        from roll.commands.preloads import forking

        with forking(loaded.config) as fork_server:
            from roll.commands.rollout import rollout as made

            folder = made(loaded, out, steps, fork_server)
        OUT.print(f"to train on these samples: rollout.replay={folder}", markup=False)


def check(
    file: File,
    overrides: Overrides = None,
    fast: Fast = False,
    rates: Rates = "",
    earlier: Earlier = None,
    expect: Expect = "",
    price: Price = None,
    debug: Debug = False,
) -> None:
    """Validate a run file and try some of its data; print the device map, the sizes of a step, and
    what the run costs: memory, tokens, hours and money (docs/costs.md)."""
    with reported(debug):
        leave_out_triton()  # first: parts that users bring may import torch
        loaded = load_config(file, overrides or ())
        from roll.commands.costs.command import Asked, costs_of, with_rows
        from roll.commands.preflight import inspect, user_folder
        from roll.commands.trials.result import Trial
        from roll.commands.trials.trial import try_out
        from roll.config.checks.notices import notices

        costs, remarks = costs_of(loaded.config, Asked(rates, earlier, expect, price))
        findings = inspect(loaded)
        wrong = [str(finding.error) for finding in findings if not finding.only_here]
        lacking = [str(finding.error) for finding in findings if finding.only_here]
        with told_if_slow("trying rows, rewards and templates, which imports Transformers"):
            trial = Trial() if fast or wrong else try_out(loaded.config, user_folder(loaded))
        wrong = list(dict.fromkeys([*wrong, *map(str, trial.wrong)]))  # once for all sources
        if wrong:  # alone: tables and hints would hide it
            report_error(UserError("\n".join(wrong)), debug)
            raise typer.Exit(EXIT_USER)
        _print_plan(loaded)
        _print_costs(with_rows(costs, trial))
        for line in trial.told:
            OUT.print(f"  {line}", markup=False)
        for line in [*remarks, *notices(loaded.config), *trial.remarks]:
            OUT.print(f"note: {line}", markup=False, style="yellow")
        for line in lacking:
            OUT.print(f"not here: {line}", markup=False, style="yellow")
        if lacking:
            OUT.print("nothing wrong in the file; it cannot run here yet", style="yellow")
        elif fast:
            OUT.print("ok, with no data tried (--fast)", style="green")
        elif trial.untried:
            told = f"ok, but not tried: {', '.join(trial.untried)}"
            OUT.print(told, style="yellow", markup=False)
        else:
            OUT.print("ok", style="green")


def try_small(
    file: File,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 3,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which output and models stay, for a look.")
    ] = None,
    own_engine: Annotated[
        bool, typer.Option("--own-engine", help="Generate with the run's engine, not with hf.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Do three tiny steps of a run on this machine, with small random models of its families and 20
    rows of each source."""
    with reported(debug):
        leave_out_triton()  # first: parts that users bring may import torch
        loaded = load_config(file, overrides or ())
        from roll.commands.try_run.command import try_run

        try_run(
            loaded,
            lambda line: OUT.print(line, markup=False),
            steps=steps,
            keep=keep,
            own_engine=own_engine,
        )


def show(file: File, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved config, with all defaults; the output is itself a run file."""
    with reported(debug):
        sys.stdout.write(run_file_text(load_config(file, overrides or ()).config))


def data(
    file: File,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows of each source to show.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Show what a run makes of its rows: lengths, rows left out, duplicates, overlap with
    validation, and some rows with what is trained of them (docs/data.md)."""
    with reported(debug):
        loaded = load_config(file, overrides or ())
        leave_out_triton()
        import logging

        from roll.commands.data.look import look_at
        from roll.commands.data.printing import print_look
        from roll.commands.preflight import user_folder
        from roll.config.user_code.import_path import searched_first

        logging.getLogger("roll").setLevel(logging.ERROR)  # the command tells it itself
        with searched_first(user_folder(loaded)):
            look = look_at(loaded.config, rows)
        print_look(look, OUT, as_json=as_json)


def migrate(
    file: Annotated[Path, typer.Argument(help="A run file of ROLL, verl or NeMo RL.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    model: Annotated[str | None, typer.Option(help="Path in place of every model's.")] = None,
    data: Annotated[str | None, typer.Option(help="Path in place of every source's.")] = None,
    debug: Debug = False,
) -> None:
    """Translate a run file of another framework; what has no counterpart is named in it."""
    with reported(debug):
        from roll.migrate.write import write_migrated

        text, told = write_migrated(file, output, model=model, data=data)
        sys.stdout.write(text if output is None else "")
        for line in told:
            OUT.print(line, markup=False)


def _print_plan(loaded: LoadedConfig) -> None:
    """Print the roles in each pool with its devices, and the sizes of one step."""
    from roll.config.step_plan import device_map, plan_lines

    OUT.print(f"{loaded.path}: pipeline {loaded.config.pipeline}", markup=False)
    table = Table("pool (devices)", "roles")
    for pool, roles in device_map(loaded.config).items():
        table.add_row(Text(pool), Text(", ".join(roles)))
    OUT.print(table)
    for line in plan_lines(loaded.config):
        OUT.print(f"  {line}", markup=False)
    _print_memory(loaded)


def _print_memory(loaded: LoadedConfig) -> None:
    """Print what each role is estimated to need of the memory of a device."""
    from roll.commands.memory.plan import devices_of
    from roll.commands.memory.report import report, table

    rows, lines = report(loaded.config, devices_of(loaded.config, os.environ))
    if rows:
        OUT.print(table(rows))
    for line in lines:
        OUT.print(f"  {line}", markup=False)


def _print_costs(costs: Costs) -> None:
    """Print the tokens of a run and, if rates are known, its hours and price."""
    from roll.commands.costs.report import lines_of, table_of

    heads, rows = table_of(costs)
    table = Table(*heads)
    for row in rows:
        table.add_row(*map(Text, row))
    OUT.print(table)
    for line in lines_of(costs):
        OUT.print(f"  {line}", markup=False)
