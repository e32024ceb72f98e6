"""What an engine gives back and takes again: each kind of memory once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll.strategy.serving.sleep import SleepState


def test_an_engine_without_its_kv_cache_gives_back_its_weights_alone() -> None:
    """As for a checkpoint just after a push. SGLang ends itself if it is to free what is free."""
    moves: list[str] = []

    async def give_back(tags: Sequence[str]) -> None:
        moves.extend(f"-{tag}" for tag in tags)

    async def take(tags: Sequence[str]) -> None:
        moves.extend(f"+{tag}" for tag in tags)

    async def run() -> None:
        state = SleepState("cuda")
        assert await state.sleep(give_back)
        await state.wake(take, weights_only=True)
        assert await state.sleep(give_back)
        assert not await state.sleep(give_back)
        await state.wake(take, weights_only=False)

    asyncio.run(run())
    assert moves == ["-kv_cache", "-weights", "+weights", "-weights", "+kv_cache", "+weights"]
