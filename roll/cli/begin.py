"""Commands to begin with: init, examples list, examples copy."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from roll.cli.shared import ERR, OUT, Debug, reported


def list_examples(debug: Debug = False) -> None:
    """List the examples."""
    with reported(debug):
        from roll.commands.begin.examples import list_examples

        table = Table("example", "what it does")
        for name, about in list_examples().items():
            table.add_row(Text(name), Text(about))
        OUT.print(table)


def copy_example(
    name: Annotated[str, typer.Argument(help="Name of the example, see `roll examples list`.")],
    folder: Annotated[
        Path, typer.Argument(help="Where its folder `examples` begins; here if left out.")
    ] = Path("."),
    debug: Debug = False,
) -> None:
    """Copy an example, with the scripts that it needs, and say how to run it. No file is
    overwritten."""
    with reported(debug):
        from roll.commands.begin.examples import copy_example

        copied = copy_example(name, folder)
        OUT.print(f"{folder / 'examples' / name}: {len(copied.files)} new files", markup=False)
        if folder.resolve() != Path.cwd():
            OUT.print(f"  cd {shlex.quote(str(folder))}", markup=False)
        for command in copied.commands:
            OUT.print(f"  {command}", markup=False)


def init(
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A file, a hub dataset, or a number of tasks of an environment."),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="rlvr, agentic, sft, distill, dpo or reward_model.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="All columns to use, as in prompt=question,answer=solution."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="What judges: a reward (rlvr), environment (agentic) or teacher."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm, sglang or hf; without an engine fsdp2, deepspeed or megatron. With the "
            "number of GPUs, as in vllm:8; 0: the cores."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("run.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take what is proposed.")] = False,
    debug: Debug = False,
) -> None:
    """Write a run file, from options or from answers to questions; `roll check` takes it."""
    with reported(debug):
        from roll.commands.begin.answers import Questions
        from roll.commands.begin.init import write_run_file
        from roll.config.agentic_base import AgenticBase
        from roll.platform.machine import this_machine

        given = {"model": model, "data": data, "pipeline": pipeline, "columns": columns}
        given |= {"reward": reward, "engine": engine}
        ask = _ask if sys.stdin.isatty() and not yes else None
        questions = Questions(given, ask, yes, lambda line: ERR.print(line, markup=False))
        written = write_run_file(questions, this_machine().gpus, out)
        OUT.print(f"{out} is written; next:", markup=False)
        # Tasks of agents have no rows to look at.
        look = () if isinstance(written, AgenticBase) else ("data",)
        for command in ("check", *look, "try", "run"):
            OUT.print(f"  roll {command} {shlex.quote(str(out))}", markup=False)


def _ask(question: str, proposal: str | None) -> str:
    """Ask at the terminal; return what was written, or the proposal."""
    return str(typer.prompt(question, default=proposal))
