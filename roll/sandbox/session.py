"""`Session`: a process that runs one program after another and keeps its state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from roll.sandbox.errors import SandboxError, WorkerLostError
from roll.sandbox.outcome import Job, Limits, Outcome, cancelled
from roll.sandbox.worker_interface import Worker
from roll.sandbox.worker_process import as_bytes

MOST_WAITING = 64
"""Workers that may wait for sessions, so that a large step does not keep all of its memory."""
_NOT_OPEN = "the session is not open: it was not entered, or it has ended"


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
        """Whether nobody uses it any more."""
        self._calling = False
        """Whether the worker has a call that has not ended."""
        self._unwanted = False
        """Whether the call was cancelled; the worker may not have it yet then."""
        self._lock = threading.Lock()
        # The only thread that waits for the worker: two would share one answer between them. It is
        # the session's own, so that its calls do not wait for those of other sessions.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-session")

    @property
    def open(self) -> bool:
        """True while it takes calls."""
        return self._worker is not None

    async def __aenter__(self) -> Self:
        """Start the process. If the waiting is cancelled, what has started is ended."""
        try:
            await asyncio.wrap_future(self._thread.submit(self._start))
        except asyncio.CancelledError:
            with self._lock:  # the thread goes on: it sees this, or has a worker already
                self._left, started = True, self._worker is not None
            if started:
                await _end_of(self._thread.submit(self._close))
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the process and all that it has started, and with it a call that runs. A second
        time, do nothing."""
        if self._left:
            return
        self._left = True
        self._cancel_call()
        closing = self._thread.submit(self._close)  # after the call
        self._thread.shutdown(wait=False)
        await _end_of(closing)
        closing.result()

    async def run(self, program: str | bytes) -> Outcome:
        """Run a program where the last one left off; shows the value of its last line.

        Its `exit_code` is None while the session goes on. After a limit was reached, or after
        `exit`, the session has ended. So it has if the waiting is cancelled, which kills the
        program.

        Raises:
            SandboxError: the session is not open, or has ended.
        """
        async with self._turn:
            if self._left:
                raise SandboxError(_NOT_OPEN)
            self._unwanted = False
            call = self._thread.submit(self._call, as_bytes(program))
            try:
                return await asyncio.shield(asyncio.wrap_future(call))
            except asyncio.CancelledError:
                self._cancel_call()
                await _end_of(call)
                raise

    def _cancel_call(self) -> None:
        """Kill the program of the call, or do not begin it; do nothing if there is no call."""
        with self._lock:
            self._unwanted = True
            if self._calling and self._worker is not None:
                with suppress(WorkerLostError):  # `_call` is told of it as well
                    self._worker.cancel()

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
        """Run a program in the worker; the session ends after a limit, `exit`, a cancellation, or
        an error of the sandbox."""
        if self._worker is None:
            raise SandboxError(_NOT_OPEN)
        try:
            outcome, goes_on = self._called(self._worker, program)
        except ValueError:
            raise  # a host refuses the program, and the session goes on
        except BaseException:
            worker, self._worker = self._worker, None
            self._workers.lose(worker)
            raise
        if not goes_on:
            self._close()
        return outcome

    def _called(self, worker: Worker, program: bytes) -> tuple[Outcome, bool]:
        """Return the outcome of a program and whether the session goes on; do not run one that was
        cancelled."""
        with self._lock:  # a cancellation comes before the order, or after it
            if self._unwanted:
                return cancelled(), False
            worker.order_call(program)
            self._calling = True
        try:
            return worker.call_outcome(self._limits)
        finally:
            with self._lock:
                self._calling = False

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
        except BaseException:
            self._workers.lose(worker)
            raise
        else:
            self._workers.give_back(worker)


async def _end_of(work: Future[Any]) -> None:
    """Wait for the end of work in a thread, even if the waiting is cancelled meanwhile, however
    often; raise the CancelledError after it."""
    waiting, given_up = asyncio.wrap_future(work), None
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError as error:
            given_up = error
    waiting.exception()  # whoever asks for the result is told of it
    if given_up is not None:
        raise given_up
