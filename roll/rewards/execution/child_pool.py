"""Several children of one kind, shared by threads.

A caller never waits for an interpreter to start when another child is about to be free: children
start in the background, as demand shows, and a killed one is replaced there too.
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
    """All children were busy for as long as the caller would wait, or the machine was. Says nothing
    about the call."""


class ChildPool:
    """Up to `size` children, started on demand; `call` may be used from any thread."""

    def __init__(self, spec: ChildSpec, size: int) -> None:
        self._cold = [Child(spec) for _ in range(size)]
        self._ready: queue.LifoQueue[Child] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._starting = 0
        self._first_is_up = threading.Event()
        self._closed = False

    def warm_up(self) -> None:
        """Start the first child and wait for it; returns at once when it is up.

        Raises:
            TimeoutError: it has not started within `START_TIMEOUT_S`.
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
        """Run on the next free child.

        Args:
            timeout_s, patience_s: see `Child.call`.
            queue_timeout_s: for a child to be free; the clock begins when the first child is up.

        Raises:
            NoChildFreeError: no child was free, or the machine gave it too little CPU time.
            TimeoutError: the call ran too long; its child was killed.
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
        """Kill the children; one in the middle of a call or a start is killed at its end."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait().close()

    def _take(self, queue_timeout_s: float | None) -> Child:
        self.warm_up()
        with contextlib.suppress(queue.Empty):
            return self._ready.get_nowait()
        self._grow()
        try:
            return self._ready.get(timeout=queue_timeout_s)
        except queue.Empty:
            raise NoChildFreeError(f"no child free within {queue_timeout_s} s") from None

    def _grow(self) -> None:
        """Start one more child, unless one is starting: two at once slow each other down."""
        with self._lock:
            if not self._cold or self._starting:
                return
            child = self._cold.pop()
            self._starting += 1
        self._start(child)

    def _start(self, child: Child) -> None:
        """In the background; the caller has counted it in `_starting`."""
        try:
            threading.Thread(target=self._start_now, args=(child,), daemon=True).start()
        except RuntimeError:
            # No thread to be had: the next call starts the child itself, or fails as it does.
            self._started(child)

    def _start_now(self, child: Child) -> None:
        try:
            # A failed start (an import, no process or open file left) shows in the next call, which
            # tries again and raises.
            with contextlib.suppress(ChildRaisedError, ChildDiedError, ChildTimeoutError, OSError):
                child.start()
        finally:
            # Whatever happened: a child that is not given back is one that no call ever gets.
            self._started(child)

    def _started(self, child: Child) -> None:
        with self._lock:
            self._starting -= 1
        self._give_back(child)
        self._first_is_up.set()

    def _give_back(self, child: Child) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._ready.put(child)
        if closed:
            child.close()
