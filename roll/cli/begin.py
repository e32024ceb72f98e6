"""Commands to begin with: examples list, examples copy."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from roll.cli.shared import OUT, Debug, reported


def list_examples(debug: Debug = False) -> None:
    """List the examples."""
    with reported(debug):
        from roll.commands.begin.examples import list_examples

        table = Table("example", "what it does")
        for name, about in list_examples().items():
            table.add_row(name, about)
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
