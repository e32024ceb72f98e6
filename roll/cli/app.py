"""`app`: the command `roll` with all its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from roll import __version__
from roll.cli import begin, machine, parts, results, run_files, talk
from roll.cli.shared import OUT


def _group(about: str) -> typer.Typer:
    """Return a command that only has subcommands."""
    return typer.Typer(help=about, no_args_is_help=True)


def _tell_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted`."""
    if wanted:
        OUT.print(f"roll {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


app = typer.Typer(
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(options)
for name, command in (
    ("init", begin.init),
    ("check", run_files.check),
    ("try", run_files.try_small),
    ("run", run_files.run),
    ("rollout", run_files.rollout),
    ("replay", results.replay),
    ("show", run_files.show),
    ("data", run_files.data),
    ("watch", results.watch),
    ("report", results.report),
    ("compare", results.compare),
    ("samples", results.samples),
    ("eval", results.evaluate),
    ("chat", talk.chat),
    ("merge", results.merge),
    ("migrate", run_files.migrate),
    ("doctor", machine.doctor),
):
    app.command(name)(command)

examples = _group("Look at examples, and copy them.")
examples.command("list")(begin.list_examples)
examples.command("copy")(begin.copy_example)
app.add_typer(examples, name="examples")

reward = _group("Work on the rewards of a run.")
reward.command("try")(parts.try_reward)
app.add_typer(reward, name="reward")

env = _group("Work on environments of agents.")
env.command("try")(parts.try_environment)
app.add_typer(env, name="env")

sandbox = _group("Run programs that nobody trusts.")
sandbox.command("serve")(machine.serve_sandbox)
app.add_typer(sandbox, name="sandbox")


def main() -> None:
    """Run the command line of this process."""
    app()
