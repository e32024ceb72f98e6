"""Commands on the output_dir of runs: merge, report, watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roll.cli.shared import OUT, Debug, reported


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


def report(
    folders: Annotated[list[Path], typer.Argument(help="The output_dir of each run.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write.")] = None,
    debug: Debug = False,
) -> None:
    """Write a page about a run, or about several that are compared: curves, alarms, samples."""
    with reported(debug):
        from roll.commands.report import write_report

        OUT.print(str(write_report(folders, out)), markup=False)


def watch(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run.")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page of the run to browsers of this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of --serve; 0: any free one.")
    ] = 0,
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
    debug: Debug = False,
) -> None:
    """Follow a run: how far it is, alarms, curves, times; until it has ended."""
    with reported(debug):
        from roll.commands import watch as watching

        if serve:
            watching.serve(folder, OUT, port=port)
        else:
            watching.watch(folder, OUT, once=once)
