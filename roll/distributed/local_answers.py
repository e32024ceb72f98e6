"""Results of a call to workers in this process."""

from __future__ import annotations

import concurrent.futures
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from roll.core.errors import RollError, WaitTimeoutError, WorkerError


class LocalAnswers:
    """Implementation of `Answers` for calls in this process: one future per rank."""

    def __init__(
        self,
        cluster: str,
        method: str,
        names: Sequence[str],
        futures: Sequence[concurrent.futures.Future[Any]],
    ) -> None:
        """Keep the futures.

        Args:
            cluster: name of all the ranks, for messages.
            method: name of the method, for messages.
            names: name of each worker, in the order of `futures`.
        """
        self._cluster = cluster
        self._method = method
        self._names = names
        self._futures = futures

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def settle(self, timeout_s: float) -> bool:
        return not concurrent.futures.wait(self._futures, timeout_s).not_done

    def poll(self, timeout_s: float) -> bool:
        finished = concurrent.futures.wait(
            self._futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION
        ).done
        for name, future in zip(self._names, self._futures, strict=True):
            error = future.exception() if future in finished else None
            if isinstance(error, Exception):
                raise_as_worker_error(error, f"{name}.{self._method}")
        return len(finished) == len(self._futures)

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(f"waited {timeout_s:g} s for {self._cluster}.{self._method}")

    def collect(self, timeout_s: float) -> list[Any]:
        if not self.poll(timeout_s):
            raise self.overdue(timeout_s)
        return [future.result() for future in self._futures]


def raise_as_worker_error(error: Exception, what: str) -> NoReturn:
    """Raise the error of a worker as a Ray cluster would raise it.

    Args:
        what: worker and method, for the message.

    Raises:
        RollError: `error` is a RollError; it is raised unchanged.
        WorkerError: `error` is another exception.
    """
    if isinstance(error, RollError):
        raise error
    trace = "".join(traceback.format_exception(error))
    raise WorkerError(f"{what} raised {type(error).__name__}: {error}\n{trace}") from error
