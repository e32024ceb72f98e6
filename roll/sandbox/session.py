"""`Session`: a process that runs one program after another and keeps its state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Self

from roll.sandbox.errors import SandboxError
from roll.sandbox.outcome import Job, Limits, Outcome
from roll.sandbox.worker_interface import Worker
from roll.sandbox.worker_process import as_bytes

MOST_WAITING = 64
"""Workers that may wait for sessions, so that a large step does not keep all of its memory."""


class SessionWorkers:
    """Workers of sessions: as many as are open, and as many that wait as were open at once before.

    A step of a run begins its episodes together, and to start a worker takes many times as long as
    to open a session in one that waits.
    """

    def __init__(self, make: Callable[[], Worker], most: int = MOST_WAITING) -> None:
        """Start none yet.

        Args:
            make: starts a worker.
            most: workers that may wait at most.
        """
        self._make, self._most = make, most
        self._waiting: list[Worker] = []
        self._open, self._peak = 0, 0
        self._lock = threading.Lock()

    def take(self) -> Worker:
        """Return a worker that no session has."""
        with self._lock:
            worker = self._waiting.pop() if self._waiting else self._make()
            self._open += 1
            self._peak = max(self._peak, self._open)
            return worker

    def give_back(self, worker: Worker) -> None:
        """Keep a worker whose session has ended, or end it if enough wait."""
        with self._lock:
            self._open -= 1
            if len(self._waiting) < min(self._peak, self._most):
                self._waiting.append(worker)
                return
        worker.close()

    def lose(self, worker: Worker) -> None:
        """End a worker whose session went wrong."""
        with self._lock:
            self._open -= 1
        worker.close()

    def close(self) -> None:
        """End the workers that wait, and from now on those that are given back."""
        with self._lock:
            self._most, waiting = 0, self._waiting
            self._waiting = []
        for worker in waiting:
            worker.close()


class Session:
    """A Python that goes on between calls, for tools of a model. Use it in `async with`.

    That a call ended, and whether it raised, is the word of the session's own process: do not
    judge answers by it. Limits and the end of the process are seen from outside.
    """

    def __init__(self, workers: SessionWorkers, limits: Limits) -> None:
        """Keep the arguments; `Sandbox.session` makes sessions."""
        self._workers, self._limits = workers, limits
        self._worker: Worker | None = None
        self._turn = asyncio.Lock()
        self._left = False
        """Whether nobody waits for the start any more."""
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """True while it takes calls."""
        return self._worker is not None

    async def __aenter__(self) -> Self:
        """Start the process. If the waiting is cancelled, what has started is ended."""
        try:
            await asyncio.to_thread(self._start)
        except asyncio.CancelledError:
            with self._lock:  # the thread goes on: it sees this, or has a worker already
                self._left = True
            await asyncio.to_thread(self._close)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the process and all that it has started."""
        await asyncio.to_thread(self._close)

    async def run(self, program: str | bytes) -> Outcome:
        """Run a program where the last one left off; shows the value of its last line.

        Its `exit_code` is None while the session goes on. After a limit was reached, or after
        `exit`, the session has ended.

        Raises:
            SandboxError: the session is not open, or has ended.
        """
        async with self._turn:
            call = asyncio.ensure_future(asyncio.to_thread(self._call, as_bytes(program)))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                if self._worker is not None and not call.done():
                    self._worker.cancel()
                    await asyncio.wait([call])
                raise

    def _start(self) -> None:
        """Take a worker and open a session in it; the worker is closed if that fails."""
        worker = self._workers.take()
        try:
            worker.wait()
            worker.open_session(Job(""), self._limits)
        except BaseException:
            self._workers.lose(worker)
            raise
        with self._lock:
            self._worker, left = worker, self._left
        if left:
            self._close()

    def _call(self, program: bytes) -> Outcome:
        """Run a program in the worker; the session ends after a limit, `exit` or SandboxError."""
        if self._worker is None:
            raise SandboxError("the session is not open: it was not entered, or it has ended")
        try:
            outcome, goes_on = self._worker.call(program, self._limits)
        except SandboxError:
            worker, self._worker = self._worker, None
            self._workers.lose(worker)
            raise
        if not goes_on:
            self._close()
        return outcome

    def _close(self) -> None:
        """End the session and give its worker back; a second call does nothing."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.end_session()
        except SandboxError:
            self._workers.lose(worker)
        else:
            self._workers.give_back(worker)
