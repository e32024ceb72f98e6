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
MADE, CLOSED = "when it was made", "when it was closed"
"""Calls of a tracker, in the words of messages."""


def at_step(step: int) -> str:
    """Return the call that gives a tracker the record of a step, in the words of messages."""
    return f"at step {step}"


class EarlierError(Exception):
    """A tracker failed in its thread, before the call that raises this."""

    def __init__(self, when: str, error: Exception) -> None:
        super().__init__(f"{when}: {error}")
        self.when = when
        """Call that failed, such as `at step 3`."""
        self.error = error


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
        self._error: EarlierError | None = None
        self._thread = threading.Thread(target=self._send, name="roll-tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, record: Record) -> None:
        """Hand the record over.

        Raises:
            EarlierError: an earlier call of the tracker failed.
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
            EarlierError: a call of the tracker failed.
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
        when = MADE
        try:
            tracker = self._make()
            while (given := self._waiting.get()) is not None:
                when = at_step(given[0])
                tracker.log(*given)
            when = CLOSED
            tracker.close()
        except Exception as error:  # noqa: BLE001 - raised where somebody waits
            self._error = EarlierError(when, error)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
