"""`Worker`: interface of a worker to the sandbox, be it a process here or a host elsewhere."""

from __future__ import annotations

from typing import Protocol

from roll.sandbox.outcome import Job, Limits, Outcome


class Worker(Protocol):
    """Runs one job at a time, or has one session. One caller at a time, except for `cancel`."""

    def wait(self) -> None:
        """Wait until it can take jobs.

        Raises:
            SandboxError: it will take none.
        """

    def order(self, job: Job, limits: Limits) -> None:
        """Begin a job, without waiting for its end.

        Raises:
            WorkerLostError: the worker is gone.
        """

    def outcome(self, limits: Limits) -> Outcome:
        """Wait for the end of the job that was ordered last.

        Raises:
            SandboxError: it could not be run.
        """

    def open_session(self, job: Job, limits: Limits) -> None:
        """Start a session.

        Raises:
            SandboxError: it could not be started.
        """

    def order_call(self, program: bytes) -> None:
        """Begin a program in the open session, without waiting for its end.

        Raises:
            WorkerLostError: the worker is gone.
        """

    def call_outcome(self, limits: Limits) -> tuple[Outcome, bool]:
        """Wait for the end of the call that was ordered last; return its outcome and whether the
        session goes on.

        Raises:
            SandboxError: it could not be run.
            ValueError: a host says that it is no program; the session goes on.
        """

    def end_session(self) -> None:
        """Kill the open session's processes, if there is one.

        Raises:
            SandboxError: the worker does not answer.
        """

    def cancel(self) -> None:
        """Stop the job or call that runs now, from another thread. Its outcome is `cancelled`."""

    def close(self) -> None:
        """End the worker. A second call does nothing."""
