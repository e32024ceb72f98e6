"""`Session`: a process that runs one program after another and keeps its state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from roll.sandbox.errors import SandboxError
from roll.sandbox.outcome import Job, Limits, Outcome
from roll.sandbox.worker_process import WorkerProcess, as_bytes


class Session:
    """A Python that goes on between calls, for tools of a model. Use it in `async with`.

    That a call ended, and whether it raised, is the word of the session's own process: do not
    judge answers by it. Limits and the end of the process are seen from outside.
    """

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """Keep the settings; `Sandbox.session` makes sessions."""
        self._settings, self._limits = settings, limits
        self._worker: WorkerProcess | None = None
        self._turn = asyncio.Lock()

    @property
    def open(self) -> bool:
        """True while it takes calls."""
        return self._worker is not None

    async def __aenter__(self) -> Self:
        """Start the process."""
        await asyncio.to_thread(self._start)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the process and all that it has started."""
        await asyncio.to_thread(self._close)

    async def run(self, program: str | bytes) -> Outcome:
        """Run a program where the last one left off; shows the value of its last line.

        Its `exit_code` is None while the session goes on. After a limit was reached, or after
        `exit`, the session has ended.

        Raises:
            SandboxError: the session is not open, or has ended.
        """
        async with self._turn:
            call = asyncio.ensure_future(asyncio.to_thread(self._call, as_bytes(program)))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                if self._worker is not None and not call.done():
                    self._worker.cancel()
                    await asyncio.wait([call])
                raise

    def _start(self) -> None:
        worker = WorkerProcess(self._settings)
        try:
            worker.wait()
            worker.open_session(Job(""), self._limits)
        except BaseException:
            worker.close()
            raise
        self._worker = worker

    def _call(self, program: bytes) -> Outcome:
        if self._worker is None:
            raise SandboxError("the session is not open: it was not entered, or it has ended")
        try:
            outcome, goes_on = self._worker.call(program, self._limits)
        except SandboxError:
            self._close()
            raise
        if not goes_on:
            self._close()
        return outcome

    def _close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
