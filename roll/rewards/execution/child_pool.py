"""Pool of child processes with the same function, shared by threads.

Children start in background threads, one at a time, when a call finds no free child. A killed child
is restarted in the background as well. So a caller takes the next child that becomes free and need
not wait for the start of an interpreter.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from roll.rewards.execution.child import (
    START_TIMEOUT_S,
    Child,
    ChildDiedError,
    ChildRaisedError,
    ChildSpec,
    ChildStalledError,
    ChildTimeoutError,
)


class NoChildFreeError(TimeoutError):
    """Error: no child was free in time, or the machine gave the child too little CPU time; does not
    mean that the call is faulty."""


class ChildPool:
    """Pool of up to `size` children, started on demand; any thread may use `call`."""

    def __init__(self, spec: ChildSpec, size: int) -> None:
        """Make a pool of at most `size` children; none is started yet."""
        self._cold = [Child(spec) for _ in range(size)]
        self._ready: queue.LifoQueue[Child] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._starting = 0
        self._first_is_up = threading.Event()
        self._closed = False

    def warm_up(self) -> None:
        """Start the first child and wait until it has started; return at once if it has already.

        A failed start ends the wait, too; the next call then tries again and raises the error.

        Raises:
            TimeoutError: the child has not started within `START_TIMEOUT_S`.
        """
        if not self._first_is_up.is_set():
            self._grow()
            if not self._first_is_up.wait(START_TIMEOUT_S):
                raise TimeoutError(f"no child process started within {START_TIMEOUT_S:g} s")

    def call(
        self,
        argument: Any,
        timeout_s: float,
        *,
        queue_timeout_s: float | None = None,
        patience_s: float | None = None,
    ) -> Any:
        """Run the function on the next free child and return its result.

        Args:
            argument, timeout_s, patience_s: see `Child.call`.
            queue_timeout_s: longest wait for a free child, in seconds, counted from the start of
                the first child; None sets no limit.

        Raises:
            NoChildFreeError: no child was free in time, or the machine gave the child too little
                CPU time.
            TimeoutError: the call exceeded its time limit; the process that ran the call was
                killed. Also raised if the first child did not start.
            ChildRaisedError, ChildDiedError, OSError: see `Child.call`.
        """
        child = self._take(queue_timeout_s)
        try:
            value = child.call(argument, timeout_s, patience_s=patience_s)
        except BaseException as error:
            if child.is_running:
                self._give_back(child)
            else:
                with self._lock:
                    self._starting += 1
                self._start(child)
            if isinstance(error, ChildTimeoutError):
                raise TimeoutError(str(error)) from None
            if isinstance(error, ChildStalledError):
                raise NoChildFreeError(str(error)) from None
            raise
        self._give_back(child)
        return value

    def close(self) -> None:
        """Kill all children; a child in a call or a start is killed when the call or start ends."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait().close()

    def _take(self, queue_timeout_s: float | None) -> Child:
        """Take a free child, or start one more and wait for whichever is free first;
        NoChildFreeError after `queue_timeout_s`."""
        self.warm_up()
        with contextlib.suppress(queue.Empty):
            return self._ready.get_nowait()
        self._grow()
        try:
            return self._ready.get(timeout=queue_timeout_s)
        except queue.Empty:
            raise NoChildFreeError(f"no child free within {queue_timeout_s} s") from None

    def _grow(self) -> None:
        """Start one more child, unless one is starting: two starts at once slow each other down."""
        with self._lock:
            if not self._cold or self._starting:
                return
            child = self._cold.pop()
            self._starting += 1
        self._start(child)

    def _start(self, child: Child) -> None:
        """Start a child in the background; the caller has already counted it in `_starting`."""
        try:
            threading.Thread(target=self._start_now, args=(child,), daemon=True).start()
        except RuntimeError:
            # The limit on threads is reached; the next call starts the child itself or fails.
            self._started(child)

    def _start_now(self, child: Child) -> None:
        """Start a child and make it available, even after a failed start (such as an import error):
        the call that gets it tries again and raises the error."""
        try:
            with contextlib.suppress(ChildRaisedError, ChildDiedError, ChildTimeoutError, OSError):
                child.start()
        finally:
            # Also after an unexpected error: a child that is not given back would be lost.
            self._started(child)

    def _started(self, child: Child) -> None:
        """Record the end of a start, failed or not, and make the child available."""
        with self._lock:
            self._starting -= 1
        self._give_back(child)
        self._first_is_up.set()

    def _give_back(self, child: Child) -> None:
        """Make a child available to callers; kill it if the pool is closed."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._ready.put(child)
        if closed:
            child.close()
