"""`app`: the command `roll` with all its subcommands."""

from __future__ import annotations

import typer

from roll.cli import machine, parts, results, run_files


def _group(about: str) -> typer.Typer:
    """Return a command that only has subcommands."""
    return typer.Typer(help=about, no_args_is_help=True)


app = typer.Typer(
    help="Post-train language models with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    run_files.run,
    run_files.check,
    run_files.show,
    results.merge,
    results.report,
    run_files.migrate,
    machine.doctor,
):
    app.command()(command)

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
