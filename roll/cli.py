"""The command line: `roll run|check|show|migrate|merge|report|reward|env|sandbox|doctor`. Importing
this module loads nothing heavy."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from roll.config.errors import RollError, UserError
from roll.config.loading.compose import LoadedConfig, compose, load_config
from roll.core.errors import StoppedEarlyError

app = typer.Typer(
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reward_app = typer.Typer(help="Work on the rewards of a run.", no_args_is_help=True)
app.add_typer(reward_app, name="reward")
env_app = typer.Typer(help="Work on environments of agents.", no_args_is_help=True)
app.add_typer(env_app, name="env")
sandbox_app = typer.Typer(help="Run programs that nobody trusts.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")
_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

File = Annotated[Path, typer.Argument(help="The YAML run file.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values that win over the file.", metavar="[KEY=VALUE]..."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
Fast = Annotated[
    bool, typer.Option("--fast", help="Try nothing out: a second, and no data is tokenized.")
]

EXIT_BROKEN, EXIT_USER, EXIT_EARLY = 1, 2, os.EX_TEMPFAIL


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Print an error of the block in a few lines and exit: code 2 for the user's mistakes, 1 for
    failures, 75 for a run that was asked to end behind a step, 128 + the signal's number for an
    interrupt."""
    try:
        yield
    except UserError as error:
        _report(error, debug)
        raise typer.Exit(EXIT_USER) from None
    except StoppedEarlyError as error:
        _err.print(f"[bold]stopped[/bold]: {error}", markup=True)
        raise typer.Exit(EXIT_EARLY) from None
    except RollError as error:
        _report(error, debug)
        raise typer.Exit(EXIT_BROKEN) from None
    except KeyboardInterrupt as error:
        _err.print(f"[bold]stopped[/bold]: {str(error) or 'Ctrl-C'}", markup=True)
        raise typer.Exit(128 + getattr(error, "signum", 2)) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # noqa: BLE001 - the last boundary: a full disk, or a bug of ours
        _report(error, debug)
        raise typer.Exit(EXIT_BROKEN) from None


def _report(error: Exception, debug: bool) -> None:
    """Print an error to stderr, with its traceback if `debug`; else say that there is one, except
    for errors of users."""
    if debug:
        traceback.print_exception(error)
    kind = type(error).__name__
    told = " ".join(str(error).splitlines()) if not isinstance(error, RollError) else str(error)
    _err.print(f"{kind}: {told}", markup=False, style="red")
    told_whole = "Traceback (most recent call last)" in told  # a worker's error has one
    if not debug and not told_whole and not isinstance(error, UserError):
        _err.print("(--debug shows the traceback)", markup=False)


@app.command()
def run(file: File, overrides: Overrides = None, debug: Debug = False) -> None:
    """Run a pipeline; continue from the newest checkpoint in its output_dir."""
    with reported(debug):
        loaded = load_config(file, overrides or ())
        _leave_out_triton()
        from roll.commands.preloads import forking

        # Comes first, so that the fork server imports what workers need while this process imports.
        with forking(loaded.config) as fork_server:
            from roll.commands.preflight import inspect

            for finding in inspect(loaded):
                raise finding.error
            from roll.commands.launch import launch

            launch(loaded, fork_server=fork_server)


@app.command()
def check(
    file: File, overrides: Overrides = None, fast: Fast = False, debug: Debug = False
) -> None:
    """Validate a run file and try some of its data; print the device map and the sizes of a
    step."""
    with reported(debug):
        loaded = load_config(file, overrides or ())
        _leave_out_triton()
        from roll.commands.preflight import inspect, user_folder
        from roll.commands.trial import try_out
        from roll.commands.trial_result import Trial
        from roll.config.checks.notices import notices

        findings = inspect(loaded)
        wrong = [str(finding.error) for finding in findings if not finding.only_here]
        lacking = [str(finding.error) for finding in findings if finding.only_here]
        trial = Trial() if fast or wrong else try_out(loaded.config, user_folder(loaded))
        wrong += [str(error) for error in trial.wrong]
        if wrong:
            # Printed first, because a table before the error would hide it.
            _report(UserError("\n".join(wrong)), debug)
        _print_plan(loaded)
        for line in trial.told:
            _out.print(f"  {line}", markup=False)
        for line in [*notices(loaded.config), *trial.remarks]:
            _out.print(f"note: {line}", markup=False, style="yellow")
        for line in lacking:
            _out.print(f"not here: {line}", markup=False, style="yellow")
        if wrong:
            _out.print("not ok: see the errors before the table", style="red")
            raise typer.Exit(EXIT_USER)
        if lacking:
            _out.print("nothing wrong in the file; it cannot run here yet", style="yellow")
        elif fast:
            _out.print("ok, with no data tried (--fast)", style="green")
        elif trial.untried:
            told = f"ok, but not tried: {', '.join(trial.untried)}"
            _out.print(told, style="yellow", markup=False)
        else:
            _out.print("ok", style="green")


@app.command()
def show(file: File, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved config, with all defaults; the output is itself a run file."""
    import json

    import yaml

    with reported(debug):
        config = load_config(file, overrides or ()).config
        text = yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False)
        sys.stdout.write(text)


@app.command()
def merge(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the output_dir of a run.")],
    target: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model's folder, if named.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the trained model of a checkpoint as one Hugging Face folder, and load it as a
    check."""
    with reported(debug):
        from roll.commands.merge import merge as merged

        merged(source, target, trust_remote_code=trust_remote_code)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="The output_dir of each run.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a page about a run, or about several that are compared: curves, alarms, samples."""
    with reported(debug):
        from roll.commands.report import write_report

        _out.print(str(write_report(folders, out)), markup=False)


@app.command()
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
            _out.print(line, markup=False)


@reward_app.command("try")
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
        loaded = load_config(file, overrides or ())
        _leave_out_triton()
        from roll.commands.preflight import user_folder
        from roll.commands.reward_try import report
        from roll.commands.reward_try.tries import try_rewards_on

        tries = try_rewards_on(
            loaded.config, user_folder(loaded), rows=rows, responses=responses, against=against
        )
        report.show(tries, _out)
        if any(one.would_stop_a_run for one in tries):
            raise typer.Exit(EXIT_BROKEN)


@env_app.command("try")
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
        _out.print(trial_table(trial))
        for line in told_lines(trial):
            _out.print(f"  {line}", markup=False)
        for line in trial.broken:
            _out.print(f"broken: {line}", markup=False, style="red")
        if trial.broken:
            raise typer.Exit(EXIT_BROKEN)
        _out.print("ok: the same seed gives the same answers, and no action fails", style="green")


@sandbox_app.command("serve")
def serve_sandbox(
    host: Annotated[
        str, typer.Option(help="Address to listen at; 127.0.0.1: only this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8700,
    level: Annotated[str, typer.Option(help="Level of isolation, see docs/sandbox.md.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Programs at the same time; one for each core.")
    ] = None,
    preload: Annotated[
        list[str] | None, typer.Option(help="A module that programs find imported; repeat it.")
    ] = None,
    readable: Annotated[
        list[str] | None, typer.Option(help="A further folder that programs may read.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(min=0, help="Programs that may wait; eight for each worker.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Open sessions; sixteen for each worker.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run programs for other machines, which ask over HTTP with the token in ROLL_SANDBOX_TOKEN."""
    with reported(debug):
        from roll.commands.sandbox_serve import serve

        serve(
            host=host,
            port=port,
            level=level,
            workers=workers,
            preload=preload or (),
            readable=readable or (),
            queue=queue,
            sessions=sessions,
            said=lambda line: _out.print(line, markup=False),
        )


@app.command()
def doctor(debug: Debug = False) -> None:
    """Show what this machine has, which backends can be used, and what to install."""
    with reported(debug):
        from roll.commands.doctor import examine, table_of

        lines = list(examine())
        _out.print(table_of(lines))
        if not all(line.ok or not line.needed for line in lines):
            raise typer.Exit(EXIT_BROKEN)


def _leave_out_triton() -> None:
    """Keep triton from being imported, because the driver starts no kernels.

    Transformers would import triton. Without it the driver needs 70 MB less, and its last messages
    are not followed by triton's report of leaks.
    """
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


def _print_plan(loaded: LoadedConfig) -> None:
    """Print the roles in each pool with its devices, and the sizes of one step."""
    from roll.config.step_plan import device_map, plan_lines

    _out.print(f"{loaded.path}: pipeline {loaded.config.pipeline}", markup=False)
    table = Table("pool (devices)", "roles")
    for pool, roles in device_map(loaded.config).items():
        table.add_row(pool, ", ".join(roles).replace("[", r"\["))
    _out.print(table)
    for line in plan_lines(loaded.config):
        _out.print(f"  {line}", markup=False)


def start_pipeline(pipeline: str, *others: str) -> Callable[[], None]:
    """Return the command of `examples/start_<pipeline>_pipeline.py`.

    Args:
        pipeline: pipeline to run.
        others: other pipelines that the run file may name instead.
    """

    def start(
        config_path: Annotated[Path, typer.Option("--config_path", help="Folder of the run file.")],
        config_name: Annotated[str, typer.Option("--config_name", help="Its name, without .yaml.")],
        overrides: Overrides = None,
        debug: Debug = False,
    ) -> None:
        """Run this example's pipeline; continue from the newest checkpoint in its output_dir."""
        file, chosen = config_path / f"{config_name}.yaml", [*(overrides or ())]
        with reported(debug):
            named = compose(file, chosen)[0].get("pipeline")
        if named not in others:
            chosen.insert(0, f"pipeline={pipeline}")
        run(file, chosen, debug)

    return lambda: typer.run(start)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
