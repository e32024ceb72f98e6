"""`WorkerProcess`: the sandbox's handle of one worker."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.sandbox.errors import SandboxError, WorkerLostError
from roll.sandbox.outcome import Job, Limits, Outcome, Status
from roll.sandbox.worker.template_process import FLAGS
from roll.sandbox.worker.wire import Frame, receive_frame, send_frame

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from worker.main import main; main({})"
_START_S = 130.0
MOST_WAIT_MS = 2**31 - 1
"""Longest time that the kernel waits, more than three weeks; a limit beyond it is one of that."""
_ANSWER_S = 60.0
"""How much longer than a job's limit an answer may take."""


class WorkerProcess:
    """A running worker. One caller at a time, except for `cancel`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start the process; `wait` waits until it can take jobs.

        Args:
            settings: `level`, `places`, `path` and `preload` of its template.

        Raises:
            SandboxError: the interpreter cannot be started, or ends at once.
        """
        self._answered = False
        try:
            self._errors = os.memfd_create("errors")
            try:
                self._link, theirs = socket.socketpair()
            except BaseException:
                os.close(self._errors)
                raise
        except OSError as error:
            raise SandboxError(
                f"cannot start a worker of the sandbox: {error.strerror}; it needs a few "
                "descriptors (`ulimit -n`)"
            ) from error
        with theirs:
            self._process = self._popen(theirs.fileno())
        try:
            self._write({**settings, "parent": os.getpid()})
        except BaseException:
            self.close()
            raise

    def _popen(self, descriptor: int) -> subprocess.Popen[bytes]:
        """Start the interpreter, which finds its end of the link at `descriptor`; SandboxError if
        that fails."""
        python = os.path.realpath(sys.executable)  # not a virtual environment's link to it
        folder = str(Path(__file__).parent)
        try:
            return subprocess.Popen(
                [python, *FLAGS, _BOOT.format(descriptor), folder],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C reaches the sandbox's own process alone
            )
        except OSError as error:
            self._link.close()
            os.close(self._errors)
            raise SandboxError(
                f"cannot start {python} as user {os.geteuid()}: {error.strerror}; the machine "
                "needs room for another process, and each folder on the way to the interpreter "
                "must be open to the user"
            ) from error

    @property
    def pid(self) -> int:
        """Process of the worker."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until the worker can take jobs. A second call does nothing.

        Raises:
            SandboxError: its level does not work here. The message says what is missing.
        """
        if not self._answered:
            self._answered = True
            self._answer(_START_S)

    def run(self, job: Job, limits: Limits) -> Outcome:
        """Run a job and wait for its end.

        Raises:
            SandboxError: it could not be run.
        """
        self.order(job, limits)
        return self.outcome(limits)

    def order(self, job: Job, limits: Limits) -> None:
        """Send a job, without waiting for its end.

        Raises:
            WorkerLostError: the worker is gone.
        """
        self._send("run", limits, job)

    def outcome(self, limits: Limits) -> Outcome:
        """Wait for the end of the job that was sent last.

        Raises:
            SandboxError: it could not be run.
        """
        header, pieces = self._answer(limits.wall_s + _ANSWER_S)
        return make_outcome(header, pieces)

    def open_session(self, job: Job, limits: Limits) -> None:
        """Start a session.

        Raises:
            SandboxError: it could not be started.
        """
        self._send("open", limits, job)
        self._answer(_ANSWER_S)

    def order_call(self, program: bytes) -> None:
        """Send a program for the open session, without waiting for its end.

        Raises:
            WorkerLostError: the worker is gone.
        """
        self._write({"do": "call"}, program)

    def call_outcome(self, limits: Limits) -> tuple[Outcome, bool]:
        """Wait for the end of the call that was sent last; return its outcome and whether the
        session goes on.

        Raises:
            SandboxError: it could not be run.
        """
        header, pieces = self._answer(limits.wall_s + _ANSWER_S)
        return make_outcome(header, pieces), header["open"]

    def end_session(self) -> None:
        """Kill the open session's processes, if there is one.

        Raises:
            SandboxError: the worker does not answer.
        """
        self._write({"do": "end"})
        self._answer(_ANSWER_S)

    def cancel(self) -> None:
        """Stop the job that runs now, from another thread. Its outcome is `cancelled`.
        WorkerLostError if the worker is gone."""
        self._write({"do": "cancel"})

    def close(self) -> None:
        """End the worker and all below it. A second call does nothing."""
        self._link.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def _send(self, do: str, limits: Limits, job: Job) -> None:
        """Send a request with a job; `do` is `run` or `open`. WorkerLostError if the worker is
        gone."""
        program, stdin, *files = map(as_bytes, (job.program, job.stdin, *job.files.values()))
        header = {"do": do, "limits": asdict(limits), "files": list(job.files)}
        self._write(header, program, stdin, *files)

    def _write(self, header: Mapping[str, Any], *pieces: bytes) -> None:
        """Send a frame; WorkerLostError if the worker is gone."""
        try:
            send_frame(self._link, header, *pieces)
        except OSError as error:
            raise WorkerLostError(self._last_words()) from error

    def _answer(self, timeout_s: float) -> Frame:
        """Return the next answer. WorkerLostError: none came in time, the worker ended, or another
        one may succeed; SandboxError: the worker reports any other error."""
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN)
        if not waiting.poll(min(timeout_s * 1000, MOST_WAIT_MS)):
            raise WorkerLostError(f"a worker of the sandbox has not answered for {timeout_s:g} s")
        frame = receive_frame(self._link)
        if frame is None:
            raise WorkerLostError(self._last_words())
        if "error" in frame[0]:
            raise (WorkerLostError if frame[0]["again"] else SandboxError)(frame[0]["error"])
        return frame

    def _last_words(self) -> str:
        """Kill the worker, and return why it ended: its last line of errors, or its exit code."""
        self._process.kill()
        code = self._process.wait()
        said = os.pread(self._errors, 1 << 16, 0).decode("utf-8", "replace").strip()
        shown = said.splitlines()[-1] if said else f"exit code {code}"
        return f"a worker of the sandbox ended: {shown}"


def make_outcome(header: dict[str, Any], pieces: list[bytes]) -> Outcome:
    """Return the outcome that a worker's answer describes; `pieces` are standard output and
    error."""
    fields = {key: value for key, value in header.items() if key != "open"}
    stdout, stderr = (piece.decode("utf-8", "backslashreplace") for piece in pieces)
    return Outcome(stdout=stdout, stderr=stderr, **{**fields, "status": Status(fields["status"])})


def as_bytes(text: str | bytes) -> bytes:
    """Return text as UTF-8; lone surrogates, which have none, become a question mark."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")
