"""Time limits that do not count pauses."""

from __future__ import annotations

import asyncio
import threading

import pytest

from roll.core.threads.daemon_threads import DaemonThreads
from roll.core.threads.pauses import Pauses, wait_within


def test_the_limit_goes_on_with_what_was_left_after_the_last_pause() -> None:
    async def main() -> float:
        loop, pauses = asyncio.get_running_loop(), Pauses()
        with pauses.wait():
            late = asyncio.ensure_future(wait_within(loop.create_future(), 0.1, pauses))
            with pauses.wait():
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            assert not late.done(), "one pause still lasts"
            begun = loop.time()
        with pytest.raises(TimeoutError):
            await late
        return loop.time() - begun

    assert 0.05 < asyncio.run(main()) < 5


def test_a_thread_may_pause_its_own_limit() -> None:
    pauses = Pauses()
    over = threading.Event()

    def call() -> str:
        with pauses.wait():
            over.wait(5)
        return "done"

    async def main() -> str:
        asyncio.get_running_loop().call_later(0.3, over.set)
        found: str = await DaemonThreads("t", max_hung=1).run(call, 0.1, pauses=pauses)
        return found

    assert asyncio.run(main()) == "done"


def test_a_pause_that_ends_after_the_wait_changes_nothing() -> None:
    async def main() -> str:
        pauses = Pauses()
        future = asyncio.get_running_loop().create_future()
        with pauses.wait():
            future.set_result("done")
            found: str = await wait_within(future, 1.0, pauses)
        await asyncio.sleep(0)
        return found

    assert asyncio.run(main()) == "done"
