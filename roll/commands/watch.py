"""`roll watch`: a run while it goes on, in the terminal or as a page that follows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from roll.core.errors import UserError
from roll.output_dir.summary import FILE
from roll.report.health.alarms import Alarm, alarms
from roll.report.health.rules import RULES
from roll.report.live.progress import progress
from roll.report.live.screen import screen
from roll.report.live.server import LivePage, PageServer
from roll.report.page import page, waiting_page
from roll.report.read import NothingYetError, Run, read_run
from roll.report.records import METRICS, RecordReader

EVERY_S = 1.0
"""Time between two looks into the folder, in seconds."""


class Watch:
    """A run that is read again when its folder has something new."""

    def __init__(self, folder: Path) -> None:
        """Look at `folder`; UserError if it is none."""
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; name the output_dir of a run")
        self.folder = folder.absolute()
        self._reader = RecordReader(self.folder / METRICS)

    def version(self) -> str:
        """Return a text that changes when the run has written a record or has ended."""
        return " ".join(_state(self.folder / name) for name in (METRICS, FILE, "config.yaml"))

    def run(self) -> Run:
        """Read the run; NothingYetError before its first record."""
        return read_run(self.folder, self.folder.name, self._reader)


def watch(folder: Path, console: Console, *, once: bool = False) -> None:
    """Show a run until it has ended, or until Ctrl-C.

    Args:
        once: show how it is now, and return.

    Raises:
        UserError: `folder` is none; or there is no terminal, and not `once`.
        NothingYetError: with `once`: the run has no record yet.
    """
    watched = Watch(folder)
    if once:
        found = watched.run()
        console.print(screen(found, alarms(found.records, RULES), progress(found, time.time())))
        return
    if not console.is_terminal:
        raise UserError("the output is no terminal: take --once, --serve, or roll report")
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for run in _changes(watched, live):
            if run is not None and progress(run, time.time()).ended:
                return


def serve(folder: Path, console: Console, *, port: int) -> None:
    """Serve the page of a run on this machine, until Ctrl-C.

    Raises:
        UserError: `folder` is none, or the port is in use.
    """
    watched = Watch(folder)
    live = LivePage(watched.version, lambda version: _page(watched, version))
    try:
        server = PageServer(live, port=port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; name another one") from None
    with server:
        console.print(f"{server.url}\n(for browsers on this machine; Ctrl-C ends)", markup=False)
        while True:
            time.sleep(3600)


def _changes(watched: Watch, live: Live) -> Iterator[Run | None]:
    """Show the run again and again; yield it each time, None before its first record."""
    shown = ""
    run: Run | None = None
    raised: list[Alarm] = []
    while True:
        version = watched.version()
        if version != shown:
            shown = version
            with _nothing_yet():
                run = watched.run()
                raised = alarms(run.records, RULES)
        if run is None:
            live.update(Text(f"{watched.folder}: no step has ended yet"), refresh=True)
        else:
            live.update(screen(run, raised, progress(run, time.time())), refresh=True)
        yield run
        time.sleep(EVERY_S)


@contextmanager
def _nothing_yet() -> Iterator[None]:
    """End the block quietly if the run has no record yet."""
    try:
        yield
    except NothingYetError:
        return


def _page(watched: Watch, version: str) -> str:
    """Return the page of the run as it is, or one that waits for its first record."""
    try:
        return page([watched.run()], version=version)
    except NothingYetError as error:
        return waiting_page(watched.folder.name, str(error), version)


def _state(path: Path) -> str:
    """Return size and time of a file, or `-` if it is missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return "-"
    return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"
