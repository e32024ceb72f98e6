"""Threads that are abandoned with their call are counted, and more than allowed are refused."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from roll.core.threads.daemon_threads import DaemonThreads, TooManyHungError


async def given_up(threads: DaemonThreads, let_go: threading.Event, *, counts: bool) -> None:
    """Begin a call that hangs until `let_go`, and cancel the wait for it."""
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(30)

    call = asyncio.ensure_future(threads.run(hang, None, count_cancelled=counts))
    await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def runs(threads: DaemonThreads) -> bool:
    try:
        return bool(await threads.run(lambda: True, 10.0))
    except TooManyHungError:
        return False


def test_calls_that_are_cancelled_and_hang_count_until_they_return() -> None:
    async def main() -> None:
        threads, let_go = DaemonThreads("test", max_hung=2), threading.Event()
        try:
            await given_up(threads, let_go, counts=True)
            assert await runs(threads)
            await given_up(threads, let_go, counts=True)
            assert not await runs(threads)
        finally:
            let_go.set()
        deadline = time.monotonic() + 10
        while not await runs(threads):
            assert time.monotonic() < deadline, "they have returned"
            await asyncio.sleep(0.01)
        threads.close()

    asyncio.run(main())


def test_calls_that_end_by_themselves_once_cancelled_do_not_count() -> None:
    async def main() -> None:
        threads, let_go = DaemonThreads("test", max_hung=1), threading.Event()
        try:
            await given_up(threads, let_go, counts=False)
            assert await runs(threads)
        finally:
            let_go.set()
        threads.close()

    asyncio.run(main())


def test_a_call_that_has_ended_when_it_is_cancelled_does_not_count() -> None:
    async def main() -> None:
        threads = DaemonThreads("test", max_hung=1)

        def cancel_itself() -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await threads.run(cancel_itself, None, count_cancelled=True)
        assert await runs(threads)
        threads.close()

    asyncio.run(main())
