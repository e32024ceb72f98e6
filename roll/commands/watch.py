"""`roll watch`: a run while it goes on, in the terminal or as a page that follows it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from roll.core.errors import DataError, UserError
from roll.output_dir.resume import LOCK
from roll.output_dir.summary import FILE, read_summary
from roll.platform.terminal import console
from roll.report.health.alarms import Alarm, alarms
from roll.report.health.rules import RULES
from roll.report.live.progress import progress, session_of
from roll.report.live.screen import screen
from roll.report.live.server import LivePage, PageServer
from roll.report.page import page, waiting_page
from roll.report.read import NothingYetError, Run, read_run, runs_in, told_of_no_run
from roll.report.records import METRICS, RecordReader

EVERY_S = 1.0
"""Shortest time between two looks into the folder, in seconds."""
REST = 9
"""Number of times as long as a look took that no other follows: a run of 100,000 steps takes
seconds to draw, on the cores of the run."""


class Watch:
    """A run that is read again when its folder has something new."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        """Look at a folder. An empty one may become that of a run.

        Args:
            now: returns the time, in seconds since 1970.

        Raises:
            UserError: `folder` is none, or holds runs in place of one.
        """
        begun = any((folder / name).exists() for name in (METRICS, FILE, "config.yaml", LOCK))
        if not folder.is_dir() or (not begun and runs_in(folder)):
            raise UserError(told_of_no_run(folder.absolute()))
        self.folder = folder.absolute()
        self._now = now
        self._reader = RecordReader(self.folder / METRICS)
        self._seen: tuple[str, Run | None] = ("", None)
        """State of the files of which `version` has read the run, and the run."""
        self._reading = threading.Lock()
        """Held while the run is read, by one of the threads that answer browsers."""
        self._judged: tuple[float, int, list[Alarm]] = (0.0, 0, [])
        """Time of the last record and number of the records of which there are alarms, and the
        alarms: they take long for a long run."""

    def version(self) -> str:
        """Return a text that changes when the run has written a record, has begun, has ended or is
        silent."""
        files = " ".join(_state(self.folder / name) for name in (METRICS, FILE, "config.yaml"))
        with self._reading:
            if self._seen[0] != files:
                try:
                    self._seen = files, self._read()
                except NothingYetError:
                    self._seen = files, None
            run = self._seen[1]
        status = "" if run is None else progress(run, self._now()).status
        return f"{files} {session_of(self.folder, self._now())} {status}"

    def run(self) -> Run:
        """Read the run, with what is known of its process; NothingYetError before its first
        record."""
        with self._reading:
            run = self._read()
        now = progress(run, self._now())
        return run if now.ended else replace(run, state=now.status)

    def _read(self) -> Run:
        """Read the run as its folder says; NothingYetError before its first record."""
        return read_run(self.folder, self.folder.name, self._reader)

    def alarms(self, run: Run) -> list[Alarm]:
        """Return the alarms of the run."""
        written_s, count, found = self._judged
        if (written_s, count) != (run.written_s, len(run.records)):
            found = alarms(run.records, RULES)
            self._judged = run.written_s, len(run.records), found
        return found

    def screen(self, run: Run) -> RenderableType:
        """Return what a terminal shows of the run."""
        return screen(run, self.alarms(run), progress(run, self._now()))

    def waits(self) -> str:
        """Return what the run waits for before its first record.

        Raises:
            DataError: it has ended without one.
        """
        if session_of(self.folder, self._now()) is not None:
            return f"{self.folder}: no step has ended yet"
        summary = read_summary(self.folder)
        if summary is not None:
            told = f"{summary.get('status')}: {summary.get('error', 'without an error')}"
            raise DataError(f"{self.folder}: the run has ended before its first step, {told}")
        return f"{self.folder}: no run has begun here yet"


def watch(folder: Path, *, once: bool = False) -> None:
    """Show a run until it has ended, or until Ctrl-C.

    Args:
        once: show how it is now, and return.

    Raises:
        UserError: `folder` is none; or there is no terminal that can draw a screen, and not `once`.
        NothingYetError: with `once`: the run has no record yet.
        DataError: the run has ended without a record.
    """
    watched = Watch(folder)
    out = console(highlight=False)
    if once:
        out.print(watched.screen(watched.run()))
        return
    if not out.is_terminal or out.is_dumb_terminal:
        dumb = f"a terminal without a screen (TERM={os.environ.get('TERM')})"
        found = dumb if out.is_terminal else "no terminal"
        raise UserError(f"the output is {found}: take --once, --serve, or roll report")
    with Live(console=out, auto_refresh=False) as live:
        goes_on = True
        while goes_on:
            begun_s = time.perf_counter()
            goes_on = _show(watched, live)
            if goes_on:
                time.sleep(pause_s(time.perf_counter() - begun_s))


def serve(folder: Path, say: Callable[[str], None], *, port: int) -> None:
    """Serve the page of a run on this machine, until Ctrl-C.

    Args:
        say: prints a line.

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
        say(f"{server.url}\n(for browsers on this machine; Ctrl-C ends)")
        while True:
            time.sleep(3600)


def pause_s(took_s: float) -> float:
    """Return the seconds until the next look, after one that took so long."""
    return max(EVERY_S, REST * took_s)


def _show(watched: Watch, live: Live) -> bool:
    """Show how the run is now; return whether it goes on."""
    try:
        run = watched.run()
    except NothingYetError:
        live.update(Text(watched.waits()), refresh=True)
        return True
    if run.state is None:  # ended; perhaps while its folder was read
        run = watched.run()
    live.update(watched.screen(run), refresh=True)
    return run.state is not None


def _page(watched: Watch, version: str) -> str:
    """Return the page of the run as it is, or one that waits for its first record."""
    try:
        return page([watched.run()], version=version)
    except NothingYetError:
        pass
    try:
        told = watched.waits()
    except DataError as error:
        told = str(error)
    return waiting_page(watched.folder.name, told, version)


def _state(path: Path) -> str:
    """Return size and time of a file, or `-` if it is missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return "-"
    return f"{found.st_ino}.{found.st_size}.{found.st_mtime_ns}"
