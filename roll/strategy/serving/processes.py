"""The processes that an engine starts below this one, and what is done about their death."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import psutil

from roll.core.errors import EngineDiedError

R = TypeVar("R")


def new_children(before: set[psutil.Process]) -> dict[psutil.Process, str]:
    """Processes below this one that were not there before, with a name each."""
    children = children_of(psutil.Process())
    return {child: name for child, name in children.items() if child not in before}


def children_of(process: psutil.Process) -> dict[psutil.Process, str]:
    """Processes below this one, with a name each; Python's own tracker aside, which ends by itself
    and serves others too."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found[child] = f"process {child.pid} ({child.name()})"
    return found


class DeathWatch:
    """Ends every wait for an engine as soon as one of its processes is gone.

    An engine notices a death by itself, but not all of its calls then end: in vLLM the answer to a
    utility call, such as a push of weights, would be waited for without end.
    """

    def __init__(self, engine: str) -> None:
        """
        Args:
            engine: what messages call it.
        """
        self._engine = engine
        self._end = asyncio.Event()
        self._reason = "reports that it is dead, though its processes live"
        self._handles: set[int] = set()

    def begin(self, processes: Mapping[psutil.Process, str]) -> None:
        """Watch these, each with a name. To be called on the engine's event loop."""
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
        """Watch no more; whoever still waits gets an EngineDiedError."""
        self._set("was closed")

    async def until_dead(self, work: Awaitable[R]) -> R:
        """What `work` gives.

        Raises:
            EngineDiedError: a process is gone; `work` is then cancelled.
        """
        call = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise self._error()
        finally:
            end.cancel()
            call.add_done_callback(_hear)
            call.cancel()

    async def cause(self, *, timeout_s: float) -> EngineDiedError:
        """For an engine that calls itself dead: what died, if that is known within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), timeout_s)
        return self._error()

    def _error(self) -> EngineDiedError:
        return EngineDiedError(f"{self._engine} {self._reason}")

    def _set(self, reason: str) -> None:
        """The first reason counts: one death brings others."""
        if not self._end.is_set():
            self._reason = reason
            self._end.set()
        for handle in self._handles:
            asyncio.get_running_loop().remove_reader(handle)
            os.close(handle)
        self._handles.clear()


def _hear(call: asyncio.Future[R]) -> None:
    """Nobody waits any more for a call that was given up: its error is not news."""
    if not call.cancelled():
        call.exception()
