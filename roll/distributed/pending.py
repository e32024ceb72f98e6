"""Calls that are on their way to several workers, and how the driver waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from roll.core.errors import WaitTimeoutError

R = TypeVar("R")
S = TypeVar("S")

SLICE_S = 0.2
"""How long `both` looks at one call before it looks at the other."""


class Answers(Protocol):
    """Results on their way, one per rank."""

    def collect(self, timeout_s: float) -> list[Any]:
        """Wait for all; raises what a rank raised as soon as it did."""
        ...

    def poll(self, timeout_s: float) -> bool:
        """Wait for all at most this long; whether all are there. Raises what a rank raised."""
        ...

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """The error that names who has not answered."""
        ...

    def done(self) -> bool: ...

    def settle(self, timeout_s: float) -> bool:
        """Wait at most this long until all have answered, raised or died; whether they have."""
        ...


class Pending(Generic[R]):
    """A call that runs on all ranks; `result` waits for it."""

    def __init__(
        self, answers: Answers, fold: Callable[[list[Any]], R], default_timeout_s: float
    ) -> None:
        self._answers = answers
        self._fold = fold
        self._default_timeout_s = default_timeout_s

    def result(self, timeout_s: float | None = None) -> R:
        """Wait and fold the ranks' results; may be asked again.

        Raises:
            WorkerError: one of these raised, or one died that the run cannot do without.
            WorkerLostError: one of these died and can be restarted.
            WaitTimeoutError: some ranks have not answered; names them.
        """
        limit_s = self._default_timeout_s if timeout_s is None else timeout_s
        return self._fold(self._answers.collect(limit_s))

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._answers.done()

    def poll(self, timeout_s: float) -> bool:
        """Wait at most this long; whether `result` returns without waiting. Raises like it."""
        return self._answers.poll(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait at most this long until nobody works on it any more, and raise nothing."""
        return self._answers.settle(timeout_s)

    @property
    def limit_s(self) -> float:
        """How long `result` waits when it is not told."""
        return self._default_timeout_s

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """The error of a wait that ran out."""
        return self._answers.overdue(timeout_s)


def both(one: Pending[R], other: Pending[S]) -> tuple[R, S]:
    """The results of two calls that wait for each other.

    When one of them fails, the other may never end: the first failure is raised at once.

    Raises:
        WorkerError: as `Pending.result`, of either.
        WaitTimeoutError: one has not answered within its limit.
    """
    begun = time.monotonic()
    waiting: list[Pending[Any]] = [one, other]
    while waiting:
        waiting = [pending for pending in waiting if not pending.poll(SLICE_S)]
        for pending in waiting:
            if time.monotonic() - begun > pending.limit_s:
                raise pending.overdue(pending.limit_s)
    return one.result(), other.result()
