"""`app`: the command `roll` with all its subcommands."""

from __future__ import annotations

from collections.abc import Callable
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
    epilog="Exit codes: 0 done; 1 a failure; 2 a mistake of the user, such as an unknown key; 75 a "
    "run that ended behind a step, as it was told to (the same command goes on, after stop_at with "
    "a later one); 128 + n signal n.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(options)


def _add(to: typer.Typer, name: str, run: Callable[..., None], example: str) -> None:
    """Add a command; its help ends with a whole command line as an example."""
    to.command(name.split()[-1], epilog=f"Example: roll {name} {example}".strip())(run)


for name, command, example in (
    ("init", begin.init, "--model Qwen/Qwen3-1.7B --data openai/gsm8k --engine vllm:8 --yes"),
    ("check", run_files.check, "run.yaml --from outputs/earlier --price 2.50"),
    ("try", run_files.try_small, "run.yaml --steps 5 --keep outputs/try"),
    ("run", run_files.run, "run.yaml max_steps=200 actor_train.optimizer.lr=1e-6"),
    ("rollout", run_files.rollout, "run.yaml --steps 20 --out outputs/samples"),
    ("replay", results.replay, "outputs/run --step 40"),
    ("show", run_files.show, "run.yaml algorithm.preset=gspo"),
    ("data", run_files.data, "run.yaml --rows 5"),
    ("watch", results.watch, "outputs/run --serve"),
    ("report", results.report, "outputs/one outputs/two --out comparison.html"),
    ("compare", results.compare, "outputs/one outputs/two"),
    ("samples", results.samples, 'outputs/run --where "reward < 0" --sort -reward --limit 5'),
    ("eval", results.evaluate, "outputs/run --sets gsm8k,my.yaml --checkpoint 40,80 -n 8"),
    ("chat", talk.chat, "outputs/run sampling.temperature=0 --checkpoint 40 --logprobs"),
    ("merge", results.merge, "outputs/run/checkpoints/step_000040 merged"),
    ("average", results.average, "outputs/run --last 5 --out averaged"),
    ("migrate", run_files.migrate, "theirs.yaml -o run.yaml --model Qwen/Qwen3-1.7B"),
    ("doctor", machine.doctor, ""),
):
    _add(app, name, command, example)

examples = _group("Look at examples, and copy them.")
_add(examples, "examples list", begin.list_examples, "")
_add(examples, "examples copy", begin.copy_example, "rlvr_quickstart")
app.add_typer(examples, name="examples")

reward = _group("Work on the rewards of a run.")
_add(reward, "reward try", parts.try_reward, "run.yaml --rows 20")
app.add_typer(reward, name="reward")

env = _group("Work on environments of agents.")
_add(env, "env try", parts.try_environment, "frozen_lake --seeds 10 --action left")
app.add_typer(env, name="env")

sandbox = _group("Run programs that nobody trusts.")
_add(sandbox, "sandbox serve", machine.serve_sandbox, "--host 0.0.0.0 --workers 8")
app.add_typer(sandbox, name="sandbox")


def main() -> None:
    """Run the command line of this process."""
    app()
