"""`Behind`: a tracker in a thread of its own.

So a slow service delays no step. And packages that take over the signals of the process, such as
SwanLab's, do so in the main thread only; Ctrl-C and SIGTERM belong to the run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from roll.output_dir.trackers.interface import Record, Tracker

MAX_WAITING = 1000
"""Largest number of records that wait for a tracker."""
CLOSE_TIMEOUT_S = 60.0
"""Time for the last records, and to finish, in seconds."""


class Behind:
    """A tracker that is made, called and closed in a daemon thread. The first error ends the
    thread, and is raised by the next call here."""

    def __init__(
        self, make: Callable[[], Tracker], *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        """Start the thread, without waiting for it.

        Args:
            make: function that returns the tracker.
            close_timeout_s: time limit of `close`, in seconds.
        """
        self._make = make
        self._close_timeout_s = close_timeout_s
        self._waiting: queue.Queue[tuple[int, Record] | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="roll-tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, record: Record) -> None:
        """Hand the record over.

        Raises:
            Exception: the error of an earlier call of the tracker.
            TimeoutError: `MAX_WAITING` records wait.
        """
        self._raise()
        try:
            self._waiting.put_nowait((step, record))
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING} records wait to be sent; it hangs") from None

    def close(self) -> None:
        """Wait until everything is sent and the tracker is closed.

        Raises:
            Exception: the error of a call of the tracker.
            TimeoutError: it takes longer than `close_timeout_s`; the thread is left behind.
        """
        self._raise()
        if self._waiting.full():
            raise TimeoutError(f"{MAX_WAITING} records wait to be sent; they are lost")
        self._waiting.put_nowait(None)
        self._thread.join(self._close_timeout_s)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(
                f"it has not finished within {self._close_timeout_s:g} s; "
                f"{self._waiting.qsize()} records waited"
            )

    def _send(self) -> None:
        """Make the tracker and pass on what comes, until the end or an error."""
        try:
            tracker = self._make()
            while (given := self._waiting.get()) is not None:
                tracker.log(*given)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - raised where somebody waits
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
