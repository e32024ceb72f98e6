"""The queue before a replica: its capacity holds, nobody overtakes, nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.core.errors import EngineError, WaitTimeoutError
from roll.core.types import Completion, GenerateRequest
from roll.rollout.engines import Replica
from tests.fakes import SAMPLING, ScriptedEngine

CAPACITY = 4


@given(
    plan=st.lists(
        st.tuples(
            st.integers(1, 7),  # sequences; more than the capacity must go alone
            st.integers(0, 5),  # turns of the loop that the engine takes
            st.sampled_from(["answers", "answers", "fails", "cancelled"]),
            st.integers(0, 12),  # turns until a cancelled one is cancelled
        ),
        max_size=12,
    )
)
def test_capacity_is_never_exceeded_and_everybody_has_a_turn_in_order(
    plan: list[tuple[int, int, str, int]],
) -> None:
    engine = ScriptedEngine(
        turns=lambda request: plan[int(request.id)][1],
        fails=lambda request: plan[int(request.id)][2] == "fails",
    )

    async def generate(request: GenerateRequest) -> list[Completion]:
        others = sum(plan[int(name)][0] for name in engine.running)
        assert not others or others + request.n <= CAPACITY
        return await engine.generate(request)

    replica = Replica(0, generate, engine.abort, CAPACITY, abort_timeout_s=5)

    async def send() -> list[object]:
        tasks = []
        for i, (size, _, _, _) in enumerate(plan):
            request = GenerateRequest(str(i), (1,), SAMPLING, n=size)
            tasks.append(asyncio.ensure_future(replica.run(request, timeout_s=5)))
        for turn in range(13):
            for task, (_, _, end, when) in zip(tasks, plan, strict=True):
                if end == "cancelled" and when == turn:
                    task.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = asyncio.run(send())
    sent = [int(name) for name in engine.seen]
    assert sent == sorted(sent)
    for result, (size, _, end, _) in zip(results, plan, strict=True):
        if end == "answers":
            assert isinstance(result, list)
            assert len(result) == size
        elif end == "fails":
            assert isinstance(result, EngineError)
    assert engine.running == {}
    assert replica.in_flight_sequences == replica.in_flight_tokens == 0


def test_the_clock_starts_when_the_request_is_sent() -> None:
    async def generate(request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(0.06)
        return []

    async def abort(request_id: str) -> None:
        return None

    replica = Replica(0, generate, abort, capacity=1)

    async def send() -> None:
        requests = [GenerateRequest(str(i), (1,), SAMPLING) for i in range(4)]
        await asyncio.gather(*(replica.run(request, timeout_s=0.15) for request in requests))

    asyncio.run(send())  # the last one waits longer than its limit


def test_a_request_that_times_out_lets_the_next_one_in() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id == "slow" else 0)
    replica = engine.replica(capacity=2)

    async def send() -> None:
        slow = asyncio.ensure_future(
            replica.run(GenerateRequest("slow", (1,), SAMPLING, n=2), timeout_s=0.02)
        )
        answers = await replica.run(GenerateRequest("next", (1,), SAMPLING), timeout_s=5)
        assert len(answers) == 1
        with pytest.raises(WaitTimeoutError):
            await slow

    asyncio.run(send())
