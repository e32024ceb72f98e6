"""Time limits of requests: one timer per replica ends each of them when it is due."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack

import pytest

from benchmarks.simulation.clock import VirtualLoop, run_virtually, virtual_loop
from roll.core.completion import Completion
from roll.core.errors import EngineError, WaitTimeoutError
from roll.core.types import GenerateRequest, Heartbeat
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from tests.fakes import SAMPLING, completion

Arguments = TypeVarTuple("Arguments")


class Silent:
    """An engine that answers when it is told to, or with nothing once a request is aborted."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[list[Completion]]] = {}
        self.aborted: list[str] = []

    def generate(self, request: GenerateRequest) -> Awaitable[list[Completion]]:
        answer: asyncio.Future[list[Completion]] = virtual_loop().create_future()
        self.answers[request.id] = answer
        return answer

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.answers[request_id].set_result([])

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 0, 0, {})


async def end_of(replica: Replica, name: str, timeout_s: float) -> float:
    """The time at which a request is given up."""
    told = f"request {name} .* no progress for {timeout_s:g} s"
    with pytest.raises(WaitTimeoutError, match=told):
        await replica.run(GenerateRequest(name, (1,), SAMPLING), timeout_s=timeout_s)
    return asyncio.get_running_loop().time()


def ends(replica: Replica, limits: dict[str, float], *others: Awaitable[Any]) -> list[float]:
    """The times at which requests with these limits, begun a second apart, are given up."""

    async def later(number: int, name: str, timeout_s: float) -> float:
        await asyncio.sleep(number)
        return await end_of(replica, name, timeout_s)

    async def main() -> list[float]:
        beside = asyncio.gather(*others)
        each = [later(i, name, limit) for i, (name, limit) in enumerate(limits.items())]
        found = await asyncio.gather(*each)
        await beside
        return found

    return run_virtually(main())


def test_each_request_has_its_own_limit_whatever_the_order() -> None:
    engine = Silent()
    limits = {"long": 50.0, "short": 5.0, "middle": 20.0}
    assert ends(Replica(0, engine), limits) == pytest.approx([50, 1 + 5, 2 + 20])
    assert engine.aborted == ["short", "middle", "long"]


def test_progress_of_the_replica_moves_the_limit_of_all_its_requests() -> None:
    replica = Replica(0, Silent())

    async def write() -> None:
        await asyncio.sleep(4)
        replica.note(Heartbeat(0, 7, 0, {}))

    assert ends(replica, {"a": 5.0, "b": 30.0}, write()) == pytest.approx([4 + 5, 4 + 30])


def test_the_end_of_a_request_is_progress_for_the_others() -> None:
    engine = Silent()
    replica = Replica(0, engine)

    async def one_ends() -> None:
        asyncio.get_running_loop().call_later(
            3, lambda: engine.answers["ends"].set_result([completion(1)])
        )
        await replica.run(GenerateRequest("ends", (1,), SAMPLING), timeout_s=5)

    assert ends(replica, {"a": 5.0}, one_ends()) == pytest.approx([3 + 5])


def test_the_limit_does_not_run_while_weights_are_loaded() -> None:
    replica = Replica(0, Silent())

    async def load() -> None:
        await asyncio.sleep(2)
        replica.loading = True
        await asyncio.sleep(100)
        replica.loading = False

    assert ends(replica, {"a": 5.0}, load()) == pytest.approx([102 + 5])


def test_a_thousand_requests_of_a_replica_need_one_timer() -> None:
    class Counting(VirtualLoop):
        """A loop that counts the timers that were set."""

        timers = 0

        def call_at(
            self,
            when: float,
            callback: Callable[[Unpack[Arguments]], object],
            *args: *Arguments,
            context: Context | None = None,
        ) -> asyncio.TimerHandle:
            self.timers += 1
            return super().call_at(when, callback, *args, context=context)

    engine = Silent()
    replica = Replica(0, engine, capacity=1000)

    async def main() -> int:
        fleet = Fleet([replica])
        names = [f"r{i}" for i in range(1000)]
        requests = [GenerateRequest(name, (1,), SAMPLING) for name in names]
        running = [
            asyncio.ensure_future(fleet.generate(r, session=r.id, timeout_s=60)) for r in requests
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for name in names:
            engine.answers[name].set_result([completion(1)])
        await asyncio.gather(*running)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counting)
        return loop.timers

    with asyncio.Runner(loop_factory=Counting) as runner:
        assert runner.run(main()) == 1


def test_an_engine_that_gives_a_future_is_heard_like_one_that_gives_a_coroutine() -> None:
    engine = Silent()
    replica = Replica(0, engine)

    async def main() -> None:
        running = asyncio.ensure_future(
            replica.run(GenerateRequest("r", (1,), SAMPLING), timeout_s=5)
        )
        await asyncio.sleep(0)
        engine.answers["r"].set_exception(EngineError("the prompt is too long"))
        with pytest.raises(EngineError, match="too long"):
            await running

    run_virtually(main())
    assert replica.requests == 0
