"""`Pool`: several workers and the jobs that wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from roll.sandbox.errors import SandboxError, WorkerLostError
from roll.sandbox.outcome import Job, Limits, Outcome, cancelled
from roll.sandbox.worker_interface import Worker

W = TypeVar("W", bound=Worker)

_ATTEMPTS = 2
"""A job whose worker is lost is run again: a worker may be killed for want of memory."""


@dataclass
class Ticket:
    """A job in the pool."""

    job: Job
    limits: Limits
    future: Future[Outcome] = field(default_factory=Future)
    _worker: Worker | None = None
    _unwanted: bool = False
    """Whether it was cancelled; it may be neither in the queue nor on a worker then."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Take the job out of the queue, or kill it where it runs."""
        with self._lock:
            self._unwanted = True
            if not self.future.cancel() and self._worker is not None:
                with suppress(WorkerLostError):  # `run_on` is told of it as well
                    self._worker.cancel()

    def run_on(self, worker: Worker) -> Outcome:
        """Run the job on a worker, where `cancel` finds it; do not run one that was cancelled."""
        with self._lock:  # `cancel` comes before the order, or after it
            if self._unwanted:
                return cancelled()
            worker.order(self.job, self.limits)
            self._worker = worker
        try:
            return worker.outcome(self.limits)
        finally:
            with self._lock:
                self._worker = None


class Pool(Generic[W]):
    """Workers, each with a thread that gives it one job after another."""

    def __init__(self, make: Callable[[], W], workers: Sequence[W]) -> None:
        """Take over running workers.

        Args:
            make: starts a further worker.
            workers: workers that take jobs or will soon.
        """
        self._make, self._closed = make, False
        self._submitting = threading.Lock()
        self.workers = list(workers)
        """Those that run now; one that is lost is replaced."""
        self._lost = [False] * len(workers)
        """Whether the worker of a place is gone; the next job there starts another."""
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._running: list[Ticket | None] = [None] * len(workers)
        self._threads: list[threading.Thread] = []
        for place in range(len(workers)):
            self._begin(place)

    def grow(self, workers: int) -> None:
        """Start further workers until there are so many; do nothing if the pool is closed."""
        with self._submitting:
            while not self._closed and len(self.workers) < workers:
                self.workers.append(self._make())
                self._lost.append(False)
                self._running.append(None)
                self._begin(len(self.workers) - 1)

    def _begin(self, place: int) -> None:
        """Start the thread of a place."""
        thread = threading.Thread(target=self._work, args=(place,), daemon=True, name="sandbox")
        self._threads.append(thread)
        thread.start()

    def submit(self, job: Job, limits: Limits) -> Ticket:
        """Put a job at the end of the queue.

        Raises:
            SandboxError: the pool is closed.
        """
        ticket = Ticket(job, limits)
        with self._submitting:  # a job behind the end of the queue would wait for ever
            if self._closed:
                raise SandboxError("the sandbox is closed")
            self._waiting.put(ticket)
        return ticket

    def close(self) -> None:
        """Fail jobs that wait, kill those that run, and end the workers."""
        with self._submitting:
            self._closed = True
        with suppress(queue.Empty):  # the threads take jobs meanwhile
            while True:
                ticket = self._waiting.get_nowait()
                if ticket is not None and ticket.future.set_running_or_notify_cancel():
                    ticket.future.set_exception(SandboxError("the sandbox is closed"))
        for _ in self._threads:
            self._waiting.put(None)
        for ticket in self._running:
            if ticket is not None:
                ticket.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self, place: int) -> None:
        """Run jobs on a worker until the pool closes."""
        while self._work_once(place):
            pass
        self.workers[place].close()

    def _work_once(self, place: int) -> bool:
        """Wait for a job and run it on a worker; return False if the pool closes. The job is
        forgotten with this frame: a waiting thread would keep its files and output.

        The worker is replaced when it is lost, and its job is run again; a job with which
        `_ATTEMPTS` workers are lost fails with the error, as one does for which no other worker can
        be started.
        """
        ticket = self._waiting.get()
        if ticket is None:
            return False
        if not ticket.future.set_running_or_notify_cancel():
            return True
        self._running[place] = ticket
        if self._closed:  # `close` may have looked before this job was among the running
            ticket.cancel()
        for attempt in range(_ATTEMPTS):
            try:
                worker = self._worker(place)
                worker.wait()
                ticket.future.set_result(ticket.run_on(worker))
                break
            except WorkerLostError as error:
                self._lose(place)
                if attempt == _ATTEMPTS - 1:
                    ticket.future.set_exception(error)
            except (SandboxError, ValueError) as error:  # told by the worker, which goes on
                ticket.future.set_exception(error)
                break
            except Exception as error:  # noqa: BLE001  # goes to whoever waits for the job
                self._lose(place)  # its answer may still come, and would be taken for the next
                ticket.future.set_exception(error)
                break
        self._running[place] = None
        return True

    def _worker(self, place: int) -> W:
        """Return the worker of a place, another one if it is lost.

        Raises:
            SandboxError: no other one can be started.
        """
        if self._lost[place]:
            self.workers[place] = self._make()
            self._lost[place] = False
        return self.workers[place]

    def _lose(self, place: int) -> None:
        """End the worker of a place."""
        self._lost[place] = True
        self.workers[place].close()
