"""The worker's loop: takes requests of the sandbox, one at a time, and answers each."""

from __future__ import annotations

import os
import select
import signal
import socket
from typing import Any

from .running import Running
from .template_process import BrokenTemplateError, TemplateProcess
from .wire import Frame, receive_frame, send_frame

_IDLE_LOOK_MS = 100


def main(descriptor: int) -> None:
    """Serve the sandbox at the other end of a socket, until it is gone."""
    link = socket.socket(fileno=descriptor)
    frame = receive_frame(link)
    if frame is not None:
        Worker(link, frame[0]).serve()


class Worker:
    """Runs jobs on one template, and starts another when that one breaks."""

    def __init__(self, link: socket.socket, settings: dict[str, Any]) -> None:
        """Keep the settings: those of `TemplateProcess`, and `parent`, the sandbox's pid."""
        self._link, self._settings = link, settings
        self._template: TemplateProcess | None = None
        self._session: Running | None = None
        self._waiting = select.poll()
        self._waiting.register(link, select.POLLIN)
        # Not the end of the link alone: a fork of the parent may hold its other end open.
        self._waiting.register(os.pidfd_open(settings["parent"]), select.POLLIN)
        self._gone = False

    def serve(self) -> None:
        """Answer requests until the sandbox closes the link or its process ends."""
        try:
            self._answer(self._start)
            while not self._gone and (frame := self._next()) is not None:
                self._answer(lambda frame=frame: self._handle(frame))
        finally:
            if self._template is not None:
                self._template.close()

    def _answer(self, handle: Any) -> None:
        """Send what `handle` returns, or its error; a broken template is replaced at once."""
        try:
            header, pieces = handle()
        except (BrokenTemplateError, OSError) as error:
            # One that has never worked will not do so at the next try.
            again = self._template is not None
            self._drop_template()
            header, pieces = {"error": str(error), "again": again}, []
        try:
            send_frame(self._link, header, *pieces)
        except OSError:
            self._gone = True

    def _start(self) -> Frame:
        """Start the first template, and answer which user its jobs have."""
        self._template = TemplateProcess(self._settings)
        return {"ready": True, "user": self._template.user}, []

    def _drop_template(self) -> None:
        """End the template, and with it an open session."""
        if self._template is not None:
            self._template.close()
        self._template = self._session = None

    def _next(self) -> Frame | None:
        """Wait for the next request, and watch an open session meanwhile."""
        while True:
            ready = self._waiting.poll(_IDLE_LOOK_MS if self._session else None)
            if ready:
                is_request = any(each == self._link.fileno() for each, _ in ready)
                return receive_frame(self._link) if is_request else None
            if self._session is not None:
                self._session.look_idle()

    def _handle(self, frame: Frame) -> Frame:
        """Answer one request: a job, or the opening, a call or the end of a session."""
        request, pieces = frame
        if self._template is None:
            self._template = TemplateProcess(self._settings)
        if request["do"] == "call":
            return self._call(pieces[0])
        if request["do"] == "end":
            self._end_session()
            return {}, []
        if request["do"] == "cancel":  # came too late: the job had ended
            return self._handle(self._next() or ({"do": "end"}, []))
        names, contents = request["files"], pieces[2:]
        running = Running(
            self._template,
            request["limits"],
            {"program": pieces[0], "stdin": pieces[1]},
            dict(zip(names, contents, strict=True)),
            session=request["do"] == "open",
        )
        if request["do"] == "open":
            self._session = running
            return {}, []
        try:
            running.run(self._interrupted, self._link)
            return _outcome(running), [bytes(each) for each in running.written.values()]
        finally:
            running.close()

    def _call(self, source: bytes) -> Frame:
        """Run a program in the open session; the answer's `open` says whether the session goes
        on."""
        session = self._session
        if session is None:
            return {"error": "the session has ended", "again": False}, []
        status = session.call(source, self._interrupted, self._link)
        outcome = _outcome(session)
        if status is None:
            session.close()
            self._session = None
        else:
            outcome |= {"status": status, "exit_code": None, "reason": ""}
        return outcome | {"open": status is not None}, [
            bytes(each) for each in session.written.values()
        ]

    def _end_session(self) -> None:
        """Kill an open session and wait for its end; do nothing if there is none."""
        if self._session is not None:
            self._session.stop("cancelled", "closed")
            self._session.finish()
            self._session.close()
            self._session = None

    def _interrupted(self) -> bool:
        """Return whether the sandbox asks to stop the job, or is gone."""
        frame = receive_frame(self._link)
        self._gone = frame is None
        return frame is None or frame[0]["do"] == "cancel"


def _outcome(running: Running) -> dict[str, Any]:
    """Return the fields of an `Outcome` but what was written."""
    ended = running.ended or {"ended": 0}
    code, by = None, None
    if os.WIFSIGNALED(ended["ended"]):
        by = os.WTERMSIG(ended["ended"])
    else:
        code = os.WEXITSTATUS(ended["ended"])
    status, reason = running.verdict or _judge(running, code, by)
    return {
        "status": status,
        "exit_code": code,
        "signal": by,
        "cut": running.cut,
        "cpu_s": running.cpu_s,
        "wall_s": running.wall_s,
        "peak_mb": running.peak / 2**20,
        "reason": reason,
    }


def _judge(running: Running, code: int | None, by: int | None) -> tuple[str, str]:
    """Return status and reason of a job that ended by itself. `code` is its exit code, or `by` the
    signal that ended it; the other one is None."""
    if running.cpu_s > running.limits["cpu_s"] or by == signal.SIGXCPU:
        return "cpu_time", f"used more than {running.limits['cpu_s']:g} s of CPU time"
    if by is not None:
        return "crashed", f"was ended by signal {by} ({signal.strsignal(by)})"
    if code == 0:
        return "ok", ""
    last = bytes(running.written["stderr"]).rstrip().rpartition(b"\n")[2]
    if last.split(b":")[0] == b"MemoryError":
        return "memory", f"got no more memory of its {running.limits['memory_mb']:g} MB"
    return "failed", f"ended with exit code {code}"
