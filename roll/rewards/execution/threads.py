"""Threads for blocking calls from an event loop; one whose call never returns is left behind.

Not `ThreadPoolExecutor`: its threads are joined when the interpreter exits, so one hung call would
keep the process alive for ever. These are daemon threads. A thread cannot be killed, so the number
of those left behind is bounded.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class TooManyHungError(Exception):
    """The bound of hung threads is reached."""


class DaemonThreads:
    """Runs blocking functions; threads are started on demand and used again."""

    def __init__(self, name: str, *, max_hung: int) -> None:
        self._name = name
        self._max_hung = max_hung
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
        self._lock = threading.Lock()
        self._hung = 0
        self._closed = False

    @property
    def hung(self) -> int:
        """Threads whose call ran out of time and has not come back since."""
        return self._hung

    async def run(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """The result of `function()`, run in a thread. The caller bounds how many run at once.

        Raises:
            TimeoutError: it took longer; its thread is left behind.
            TooManyHungError: so many threads hang that no more calls are taken.
        """
        if self._hung >= self._max_hung:
            raise TooManyHungError(f"{self._hung} calls have not returned")
        job = _Job(function)
        self._submit(job)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.future), timeout_s)
        except TimeoutError:
            with self._lock:
                # The function may itself raise TimeoutError, or end at this very moment.
                if not job.ended:
                    job.abandoned = True
                    self._hung += 1
            raise

    def close(self) -> None:
        """Let the idle threads end; running ones end after their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for jobs in idle:
            jobs.put(None)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
        if jobs is None:
            jobs = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True).start()
        jobs.put(job)

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            result, error = None, None
            try:
                result = job.function()
            except BaseException as raised:  # noqa: BLE001 - the thread boundary: the caller raises it
                error = raised
            with self._lock:
                job.ended = True
                self._hung -= job.abandoned
                closed = self._closed
                if not closed:
                    self._idle.append(jobs)
            job.finish(result, error)
            if closed:
                return


class _Job:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: Future[Any] = Future()
        self.ended = False
        self.abandoned = False

    def finish(self, result: Any, error: BaseException | None) -> None:
        # False: the waiter has given up and cancelled the future.
        if self.future.set_running_or_notify_cancel():
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
