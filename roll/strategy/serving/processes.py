"""The processes that an engine starts as children of this one, and the watch over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import psutil

from roll.core.errors import EngineDiedError

R = TypeVar("R")
LOOK_S = 1.0
"""Interval at which a wait asks the engine whether it takes itself for dead, in seconds."""
CAUSE_S = 2.0
"""Longest wait for the name of the dead process after an engine reports its death, in seconds."""


def new_children(before: set[psutil.Process]) -> dict[psutil.Process, str]:
    """Map the processes below this one that are not in `before` to a name for messages."""
    children = children_of(psutil.Process())
    return {child: name for child, name in children.items() if child not in before}


def children_of(process: psutil.Process) -> dict[psutil.Process, str]:
    """Map each process below `process` to a name for messages.

    Python's resource tracker is left out: it ends by itself and serves other processes too.
    """
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found[child] = f"process {child.pid} ({child.name()})"
    return found


class DeathWatch:
    """Watch over an engine's processes, which ends every wait for the engine when one of them dies.

    An engine notices a death itself, but does not end all of its calls: a utility call of vLLM,
    such as a push of weights, would wait for ever. So would a call of an engine that takes itself
    for dead although all of its processes live.
    """

    def __init__(self, engine: str, says_dead: Callable[[], bool] = lambda: False) -> None:
        """Watch no process yet.

        Args:
            engine: name of the engine in error messages.
            says_dead: function that returns whether the engine takes itself for dead.
        """
        self._engine = engine
        self._says_dead = says_dead
        self._end = asyncio.Event()
        self._reason = "reports that it is dead, though its processes live"
        self._handles: set[int] = set()

    def begin(self, processes: Mapping[psutil.Process, str]) -> None:
        """Watch `processes` (process -> name for messages); call this on the event loop."""
        loop = asyncio.get_running_loop()
        for process, name in processes.items():
            try:
                handle = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self._set(f"died: {name} is gone")
                continue
            self._handles.add(handle)
            loop.add_reader(handle, self._set, f"died: {name} is gone; its own log has the reason")

    def end(self) -> None:
        """Stop watching; calls that still wait get an EngineDiedError. Call this on the event
        loop."""
        self._set("was closed")

    async def until_dead(self, work: Awaitable[R]) -> R:
        """Wait for `work` and return its result.

        Raises:
            EngineDiedError: a process died, the engine takes itself for dead, or the watch has
                ended; `work` is then cancelled.
        """
        call = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._end.wait())
        first = asyncio.FIRST_COMPLETED
        try:
            while not (call.done() or end.done()):
                await asyncio.wait([call, end], timeout=LOOK_S, return_when=first)
                if not call.done() and self._says_dead():
                    raise await self.cause(timeout_s=CAUSE_S)
            if call.done():
                return call.result()
            raise self._error()
        finally:
            end.cancel()
            call.add_done_callback(_hear)
            call.cancel()

    async def cause(self, *, timeout_s: float) -> EngineDiedError:
        """Return the error for an engine that reports its own death.

        The error names the dead process if the watch notices its death within `timeout_s` seconds.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), timeout_s)
        return self._error()

    def _error(self) -> EngineDiedError:
        return EngineDiedError(f"{self._engine} {self._reason}")

    def _set(self, reason: str) -> None:
        """End all waits; keep only the first reason, because one death causes others."""
        if not self._end.is_set():
            self._reason = reason
            self._end.set()
        for handle in self._handles:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        self._handles.clear()


def _hear(call: asyncio.Future[R]) -> None:
    """Read the error of a call that was given up, so that asyncio does not report it."""
    if not call.cancelled():
        call.exception()
