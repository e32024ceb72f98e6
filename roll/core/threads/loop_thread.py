"""An event loop in its own thread, which keeps running while other threads are busy or blocked.

Other threads hand coroutines over to the loop. They wait for the results on a
`concurrent.futures.Future`, or in `run`. `close` cancels the coroutines that still run.
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
"""Longest uninterrupted wait in `run`, in seconds. A signal that the system delivers to another
thread does not wake the waiting thread, so `run` waits in slices of this length."""


class LoopThread:
    """An event loop in its own thread. The loop runs from the construction of this object until
    `close`, or until the interpreter ends.

    Example:
        with LoopThread("roll-driver") as loop:
            serving = loop.submit(serve())
            batch = loop.run(collect())
    """

    def __init__(self, name: str, *, cancel_timeout_s: float = 10.0) -> None:
        """Start the thread.

        Args:
            name: name of the thread, for logs and debuggers.
            cancel_timeout_s: longest wait for cancelled coroutines to end, in seconds.
        """
        self._cancel_timeout_s = cancel_timeout_s
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()
        # A daemon thread: a coroutine that blocks the loop must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; any thread may call this. Cancelling the future cancels `work`.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:  # so that `close` cannot stop the loop in between
            if self._closed:
                work.close()
                raise RuntimeError(f"the event loop {self._thread.name!r} is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, block until `work` ends, and return its result.

        Errors of `work` are raised here. If an exception interrupts the wait (Ctrl-C, or a signal
        handler that raises), `work` is cancelled, given a limited time to end, and the exception is
        raised.

        Raises:
            RuntimeError: the loop is closed, or the caller is the loop's own thread, which would
                wait for ever.
            concurrent.futures.CancelledError: `work` was cancelled from elsewhere.
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
        """Cancel all running coroutines, give them a limited time to end, and end the thread.

        If a coroutine or a thread of the loop still runs then, the thread is left running and a
        warning is logged. A second call does nothing. Must not be called on the loop's own thread.
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
        """Run the loop until it is stopped, then cancel what is left; the work of the thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while not self._closed:
                # A task passes SystemExit on to its loop; who awaits the task gets it, too.
                with suppress(SystemExit):
                    runner.get_loop().run_forever()
            # On exit, the runner cancels all remaining tasks.

    def _end(
        self, future: concurrent.futures.Future[Any], tasks: list[asyncio.Task[Any] | None]
    ) -> None:
        """Cancel the task behind `future` and wait for its end. Cancelling `future` itself would
        mark `future` as done at once, while the task still runs."""

        async def cancel() -> None:  # runs after the first step of `hold`, which adds to `tasks`
            for task in tasks:
                if task is not None:
                    task.cancel()

        with suppress(RuntimeError):  # the loop was closed meanwhile, which cancels the task too
            self.submit(cancel())
        if not concurrent.futures.wait([future], self._cancel_timeout_s).done:
            LOGGER.warning(
                "waited %g s for what runs on the event loop %r to end after its cancellation",
                self._cancel_timeout_s,
                self._thread.name,
            )


def _describe(task: asyncio.Task[Any]) -> str:
    """Return the name of the coroutine that a task runs, for the log."""
    work = task.get_coro()
    return work.__qualname__ if inspect.iscoroutine(work) else repr(work)
