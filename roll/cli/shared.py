"""Consoles, common arguments of the commands, and the boundary that reports errors."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from roll.config.errors import RollError, UserError
from roll.core.errors import StoppedEarlyError
from roll.platform.terminal import console

OUT = console(highlight=False, soft_wrap=True)
ERR = console(stderr=True, highlight=False, soft_wrap=True)

File = Annotated[Path, typer.Argument(help="The YAML run file.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values that win over the file.", metavar="KEY=VALUE"),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

EXIT_BROKEN, EXIT_USER, EXIT_EARLY = 1, 2, os.EX_TEMPFAIL


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Print an error of the block in a few lines and exit: code 2 for the user's mistakes, 1 for
    failures, 75 for a run that was asked to end behind a step, 128 + the signal's number for an
    interrupt."""
    try:
        yield
    except UserError as error:
        report_error(error, debug)
        raise typer.Exit(EXIT_USER) from None
    except StoppedEarlyError as error:
        _print_stopped(str(error))
        raise typer.Exit(EXIT_EARLY) from None
    except RollError as error:
        report_error(error, debug)
        raise typer.Exit(EXIT_BROKEN) from None
    except KeyboardInterrupt as error:
        told = "; ".join([str(error) or "Ctrl-C", *getattr(error, "__notes__", ())])
        _print_stopped(told)
        raise typer.Exit(128 + getattr(error, "signum", 2)) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # noqa: BLE001 - the last boundary: a full disk, or a bug of ours
        report_error(error, debug)
        raise typer.Exit(EXIT_BROKEN) from None


def _print_stopped(told: str) -> None:
    """Print to stderr that the command was stopped, and what is told of it."""
    ERR.print(Text.assemble(("stopped", "bold"), f": {told}"))


def report_error(error: Exception, debug: bool) -> None:
    """Print an error to stderr, with its traceback if `debug`; else say that there is one, except
    for errors of users."""
    if debug:
        traceback.print_exception(error)
    kind = type(error).__name__
    told = " ".join(str(error).splitlines()) if not isinstance(error, RollError) else str(error)
    ERR.print(f"{kind}: {told}", markup=False, style="red")
    told_whole = "Traceback (most recent call last)" in told  # a worker's error has one
    if not debug and not told_whole and not isinstance(error, UserError):
        ERR.print("(--debug shows the traceback)", markup=False)


IMPORTING = "importing PyTorch and Transformers, which takes long on a busy machine"


@contextmanager
def told_if_slow(told: str = IMPORTING, patience_s: float = 5.0) -> Iterator[None]:
    """Print a line to stderr if the block takes longer than `patience_s`."""
    timer = threading.Timer(patience_s, lambda: ERR.print(told, style="dim", markup=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave_out_triton() -> None:
    """Keep triton from being imported, because the driver starts no kernels.

    Transformers would import triton. Without it the driver needs 70 MB less, and its last messages
    are not followed by triton's report of leaks.
    """
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
