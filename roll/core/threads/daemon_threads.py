"""Daemon threads for blocking calls from an event loop; a thread whose call hangs is abandoned.

`ThreadPoolExecutor` is not used: the interpreter joins its threads at exit, so one call that hangs
would keep the process alive for ever. A thread cannot be killed, so the number of abandoned threads
is limited.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from roll.core.threads.pauses import Pauses, wait_within
from roll.core.threads.user_errors import passable


class TooManyHungError(Exception):
    """Error: the limit on calls that hang is reached."""


class DaemonThreads:
    """Threads that run blocking functions; they are started on demand and used again."""

    def __init__(self, name: str, *, max_hung: int) -> None:
        """Start no thread yet.

        Args:
            name: name of the threads, for debuggers.
            max_hung: number of hanging calls from which on `run` refuses further calls.
        """
        self._name = name
        self._max_hung = max_hung
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._lock = threading.Lock()
        self._hung = 0  # threads whose call was given up and has not returned since
        self._closed = False

    async def run(
        self,
        function: Callable[[], Any],
        timeout_s: float | None,
        *,
        late: Callable[[Any], None] | None = None,
        count_cancelled: bool = False,
        pauses: Pauses | None = None,
    ) -> Any:
        """Run `function()` in a thread and return its result, or raise its error, see `passable`.

        The number of calls at once is not limited here; the caller must limit it.

        Args:
            function: function to run.
            timeout_s: time limit in seconds; None sets none.
            late: function called with a result that comes after the time limit, in the thread. It
                must not raise.
            count_cancelled: whether a call counts as hanging whose wait was cancelled, as one does
                after the time limit; for callers whose own time limit cancels the wait. Calls that
                end by themselves soon after need no count.
            pauses: waits that do not count against the limit.

        Raises:
            TimeoutError: the function took longer than `timeout_s`; its thread is abandoned.
            TooManyHungError: `max_hung` calls hang already.
        """
        if self._hung >= self._max_hung:
            raise TooManyHungError(f"{self._hung} calls have not returned")
        job = _Job(function, late)
        self._submit(job)
        try:
            return await wait_within(asyncio.wrap_future(job.future), timeout_s, pauses)
        except (TimeoutError, asyncio.CancelledError) as stopped:
            cancelled = isinstance(stopped, asyncio.CancelledError)
            if cancelled and not count_cancelled:
                raise
            with self._lock:
                job.abandoned = not job.ended
                self._hung += job.abandoned
            if job.abandoned or cancelled:
                raise
            return job.outcome()  # it ended at this very moment, or raised TimeoutError itself

    def close(self) -> None:
        """Let the idle threads end; busy threads end after their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for jobs in idle:
            jobs.put(None)

    def _submit(self, job: _Job) -> None:
        """Give the job to an idle thread, or to a new one."""
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True).start()
        jobs.put(job)

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        """Run jobs from the thread's queue until None comes or the threads are closed; between
        jobs, wait as an idle thread."""
        while self._work_once(jobs):
            pass

    def _work_once(self, jobs: queue.SimpleQueue[_Job | None]) -> bool:
        """Wait for a job and run it; return whether to wait for another. The job is forgotten
        with this frame: a waiting thread would keep what the call was made with."""
        job = jobs.get()
        if job is None:
            return False
        job.work()
        with self._lock:
            job.ended = True
            self._hung -= job.abandoned
            closed = self._closed
            if not closed:
                self._idle.append(jobs)
        job.finish()
        return not closed


class _Job:
    """Call of a function in a thread, with the future of its result."""

    def __init__(self, function: Callable[[], Any], late: Callable[[Any], None] | None) -> None:
        self.future: Future[Any] = Future()
        self.ended = False
        self.abandoned = False
        self._function, self._late = function, late
        self._result: Any = None
        self._error: BaseException | None = None

    def work(self) -> None:
        """Run the function, and keep its result or error."""
        try:
            self._result = self._function()
        except BaseException as raised:  # noqa: BLE001 - the thread boundary: the caller raises it
            self._error = passable(raised)

    def outcome(self) -> Any:
        """Return the result of the function that has run, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self) -> None:
        """Set the error, or without one the result, unless the caller has cancelled. Pass a result
        on to `late` that the caller has given up."""
        if self.abandoned and self._error is None and self._late is not None:
            self._late(self._result)
        if self.future.set_running_or_notify_cancel():
            if self._error is not None:
                self.future.set_exception(self._error)
            else:
                self.future.set_result(self._result)
