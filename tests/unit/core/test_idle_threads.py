"""Threads that wait for work keep nothing of the work before."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from roll.core.threads.daemon_threads import DaemonThreads
from roll.distributed.local import _serve


class Large:
    """Stands for the arguments or the result of a call."""

    def itself(self) -> Large:
        return self


def forgotten(held: weakref.ref[Large]) -> bool:
    """Nothing keeps it any more, a moment after the call."""
    deadline = time.monotonic() + 60
    while held() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return held() is None


def test_an_idle_daemon_thread_forgets_its_last_call() -> None:
    threads = DaemonThreads("test", max_hung=1)

    async def run() -> weakref.ref[Large]:
        large = Large()
        assert await threads.run(large.itself, timeout_s=10) is large
        return weakref.ref(large)

    held = asyncio.run(run())
    assert forgotten(held)
    threads.close()


def test_an_idle_local_worker_forgets_its_last_call() -> None:
    calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
    thread = threading.Thread(target=_serve, args=(calls,))
    thread.start()
    large = Large()
    held = weakref.ref(large)
    calls.put(large.itself)
    del large
    assert forgotten(held)
    calls.put(None)
    thread.join(10)
    assert not thread.is_alive()
