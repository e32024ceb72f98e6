"""Commands on this machine: doctor, and the sandbox as a service."""

from __future__ import annotations

from typing import Annotated

import typer

from roll.cli.shared import EXIT_BROKEN, OUT, Debug, reported


def doctor(debug: Debug = False) -> None:
    """Show what this machine has, which backends can be used, and what to install."""
    with reported(debug):
        from roll.commands.doctor import examine, table_of

        lines = list(examine())
        OUT.print(table_of(lines))
        if not all(line.ok or not line.needed for line in lines):
            raise typer.Exit(EXIT_BROKEN)


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
            said=lambda line: OUT.print(line, markup=False),
        )
