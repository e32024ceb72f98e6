"""Joined calls: each caller gets its own results, errors reach all, nobody holds up others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.rpc_batching import BatchedCalls


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(), max_size=4), st.integers(0, 4), st.booleans()),
        max_size=12,
    )
)
def test_every_caller_gets_its_own_results(callers: list[tuple[list[int], int, bool]]) -> None:
    calls: list[list[int]] = []

    async def double(items: list[int]) -> list[int]:
        calls.append(items)
        await asyncio.sleep(0.001)
        return [2 * item for item in items]

    async def run() -> None:
        joined: BatchedCalls[int, int] = BatchedCalls(double, window_s=0.001)

        async def caller(items: list[int], delay: int) -> list[int]:
            await asyncio.sleep(delay / 1000)
            return await joined.ask(items)

        tasks = [asyncio.create_task(caller(items, delay)) for items, delay, _ in callers]
        await asyncio.sleep(0.002)
        for task, (_, _, cancelled) in zip(tasks, callers, strict=True):
            if cancelled:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result, (items, _, cancelled) in zip(results, callers, strict=True):
            if not (cancelled and isinstance(result, asyncio.CancelledError)):
                assert result == [2 * item for item in items]

    asyncio.run(run())


def test_lists_of_the_same_moment_share_a_call() -> None:
    calls = []

    async def count(items: list[int]) -> list[int]:
        calls.append(len(items))
        return items

    async def run() -> None:
        joined: BatchedCalls[int, int] = BatchedCalls(count)
        await asyncio.gather(*(joined.ask([i]) for i in range(20)))

    asyncio.run(run())
    assert calls == [20]


def test_an_error_reaches_everybody_who_joined_and_nobody_after() -> None:
    async def fail_on_zero(items: list[int]) -> list[int]:
        if 0 in items:
            raise ValueError("zero")
        return items

    async def run() -> None:
        joined: BatchedCalls[int, int] = BatchedCalls(fail_on_zero)
        results = await asyncio.gather(joined.ask([0]), joined.ask([1]), return_exceptions=True)
        assert [type(r) for r in results] == [ValueError, ValueError]
        assert await joined.ask([1]) == [1]

    asyncio.run(run())


def test_a_reward_that_fails_after_all_left_is_not_waited_for() -> None:
    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(60)
        return items

    async def run() -> None:
        joined: BatchedCalls[int, int] = BatchedCalls(slow, window_s=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(joined.ask([1]), 0.05)

    asyncio.run(run())
