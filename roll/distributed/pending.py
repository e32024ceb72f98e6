"""`Pending`: a call that runs on several workers, and the ways in which the driver waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from roll.core.errors import WaitTimeoutError

R = TypeVar("R")
S = TypeVar("S")

SLICE_S = 0.2
"""Time that `both` waits for one call before it waits for the other, in seconds."""


class Answers(Protocol):
    """Interface to the results of a running call, one result per rank."""

    def collect(self, timeout_s: float) -> list[Any]:
        """Wait for the results of all ranks and return them in order. As soon as a rank raises an
        exception, raise it here.

        Raises:
            WaitTimeoutError: some ranks have not answered within `timeout_s`.
        """
        ...

    def poll(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the results of all ranks, and return whether all are there.
        As soon as a rank raises an exception, raise it here."""
        ...

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """Return an error that names the ranks that have not answered."""
        ...

    def done(self) -> bool:
        """Return whether every rank has answered or failed, without waiting."""
        ...

    def settle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until every rank has answered, raised or died, and return
        whether this is so. Raise no errors of ranks."""
        ...


class Pending(Generic[R]):
    """A call that runs on several ranks; `result` waits for its end."""

    def __init__(
        self, answers: Answers, fold: Callable[[list[Any]], R], default_timeout_s: float
    ) -> None:
        """Keep the answers.

        Args:
            fold: function that combines the results of all ranks, given in their order.
            default_timeout_s: time limit of `result`, in seconds.
        """
        self._answers = answers
        self._fold = fold
        self.limit_s = default_timeout_s
        """Default time limit of `result`, in seconds."""

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the results of all ranks and return the combined result. Repeated calls are
        allowed.

        Raises:
            WorkerError: one of these workers raised an exception, or a worker that is not
                replaceable died.
            WorkerLostError: one of these workers died; it is replaceable.
            WaitTimeoutError: some ranks have not answered in time; the message names them.
        """
        limit_s = self.limit_s if timeout_s is None else timeout_s
        return self._fold(self._answers.collect(limit_s))

    def done(self) -> bool:
        """Return whether every rank has answered or failed, without waiting."""
        return self._answers.done()

    def poll(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`, and return whether `result` would return without waiting. Raise
        the same errors of workers as `result`."""
        return self._answers.poll(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no rank works on the call any more, and return whether
        this is so. Raise no errors of ranks."""
        return self._answers.settle(timeout_s)

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """Return the error for a wait that has reached its limit `timeout_s`."""
        return self._answers.overdue(timeout_s)


def both(one: Pending[R], other: Pending[S]) -> tuple[R, S]:
    """Wait for two calls that depend on each other, and return both results.

    If one call fails, the other may never end. So the first failure is raised at once.

    Raises:
        WorkerError: one of the calls failed; see `Pending.result`.
        WaitTimeoutError: one of the calls has not ended within its default time limit.
    """
    begun = time.monotonic()
    waiting: list[Pending[Any]] = [one, other]
    while waiting:
        waiting = [pending for pending in waiting if not pending.poll(SLICE_S)]
        for pending in waiting:
            if time.monotonic() - begun > pending.limit_s:
                raise pending.overdue(pending.limit_s)
    return one.result(), other.result()
