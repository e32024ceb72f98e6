"""Who waits for a turn gets it in order, threads and coroutines alike."""

from __future__ import annotations

import asyncio
import threading
import time

from roll.core.threads.fair_lock import FairLock


def test_a_coroutine_gets_its_turn_before_a_thread_that_comes_again_and_again() -> None:
    turn, over = FairLock(), threading.Event()
    rounds = 0

    def train() -> None:
        nonlocal rounds
        while not over.is_set():
            with turn.held():
                rounds += 1
                time.sleep(0.1)

    async def revive() -> int:
        await asyncio.sleep(0.15)
        before = rounds
        async with turn.awaited():
            return rounds - before

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        assert asyncio.run(asyncio.wait_for(revive(), 10)) <= 1
    finally:
        over.set()
        trainer.join()


def test_one_that_stops_waiting_holds_nobody_up() -> None:
    turn = FairLock()

    async def give_up() -> None:
        with turn.held():
            waiting = asyncio.ensure_future(hold())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(hold(), 5)

    async def hold() -> None:
        async with turn.awaited():
            return

    asyncio.run(give_up())
