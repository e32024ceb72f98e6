"""An event loop in a thread of its own, which goes on whatever the other threads do.

It serves coroutines that other threads hand over, until `close` cancels what is left. Whoever hands
one over waits for it on a `concurrent.futures.Future`, or in `run`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)
SLICE_S = 0.5
"""A signal that another thread receives does not wake a waiting one; it looks up this often."""


class LoopThread:
    """Runs coroutines from its construction to `close`, or to the end of the interpreter.

    Example:
        with LoopThread("roll-driver") as loop:
            serving = loop.submit(serve())
            batch = loop.run(collect())
    """

    def __init__(self, name: str, *, cancel_timeout_s: float = 10.0) -> None:
        """Start the thread.

        Args:
            cancel_timeout_s: how long cancelled coroutines may take to end before nobody waits for
                them any more.
        """
        self._cancel_timeout_s = cancel_timeout_s
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()
        # A daemon: a coroutine may block the loop for good, and must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; from any thread. Cancelling the future cancels `work`.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:  # else `close` could stop the loop before it hears of `work`
            if self._closed:
                work.close()
                raise RuntimeError(f"the event loop {self._thread.name!r} is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and block until it ends; its errors pass through.

        What interrupts the wait (Ctrl-C, a signal's handler that raises) cancels `work`, waits a
        bounded time for it to end, and goes on its way.

        Raises:
            RuntimeError: the loop is closed, or this is its own thread, which would wait for ever.
            concurrent.futures.CancelledError: `work` was cancelled by somebody else.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(f"the event loop {self._thread.name!r} cannot wait for itself")
        tasks: list[asyncio.Task[Any] | None] = []

        async def hold() -> T:
            tasks.append(asyncio.current_task())
            return await work

        try:
            future = self.submit(hold())
        except RuntimeError:
            work.close()
            raise
        try:
            while not concurrent.futures.wait([future], SLICE_S).done:
                pass
            return future.result()
        finally:
            if not future.done():
                self._end(future, tasks)

    def close(self) -> None:
        """Cancel what runs, wait a bounded time for its end, and end the thread.

        A loop that is blocked is left behind, with a warning; a second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._cancel_timeout_s)
        if self._thread.is_alive():
            left = ", ".join(sorted(_describe(task) for task in asyncio.all_tasks(self._loop)))
            LOGGER.warning(
                "waited %g s for the event loop %r to end, it is left behind with: %s",
                self._cancel_timeout_s,
                self._thread.name,
                left or "nothing but its threads",
            )

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()  # the runner cancels what is left at its end

    def _end(
        self, future: concurrent.futures.Future[Any], tasks: list[asyncio.Task[Any] | None]
    ) -> None:
        """Cancel the task behind `future`, not `future`, which would be done at once."""

        async def cancel() -> None:  # as a task of its own it comes after the first step of `hold`
            for task in tasks:
                if task is not None:
                    task.cancel()

        with suppress(RuntimeError):  # closed in the meantime, which cancels it as well
            self.submit(cancel())
        if not concurrent.futures.wait([future], self._cancel_timeout_s).done:
            LOGGER.warning(
                "waited %g s for what runs on the event loop %r to end after its cancellation",
                self._cancel_timeout_s,
                self._thread.name,
            )


def _describe(task: asyncio.Task[Any]) -> str:
    work = task.get_coro()
    return work.__qualname__ if inspect.iscoroutine(work) else repr(work)
