"""Pushes of weights that break: survivors with torn weights get no requests until one succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from roll.core.completion import Completion
from roll.core.errors import EngineError, IncompleteWeightsError
from tests.unit.rollout.test_fleet import (
    Writer,
    answer,
    counts_up,
    finish,
    fleet_of,
    request,
    turns,
)


def writers(count: int) -> list[Writer]:
    return [Writer() for _ in range(count)]


@pytest.mark.parametrize("continue_in_flight", [True, False])
def test_when_a_receiver_dies_in_a_push_all_requests_of_the_others_end_well(
    continue_in_flight: bool,
) -> None:
    engines = writers(8)  # two of them in each wave
    fleet = fleet_of(*engines, capacity=4, continue_in_flight=continue_in_flight)
    fleet.on_lost = lambda replica, reason: None
    pushed: list[list[int]] = []

    async def push(indices: Sequence[int]) -> None:
        pushed.append(list(indices))
        await turns(5)
        if 3 in indices:
            engines[3].dead = True
            for index in indices:  # they notice first, and end their requests
                engines[index].weights_incomplete = True
            await turns(15)
            raise EngineError("the push broke")
        for index in indices:
            engines[index].load(1)

    async def update() -> list[list[Completion]]:
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(14)]
        await turns(10)
        for replica, engine in zip(fleet.replicas, engines, strict=True):
            replica.note(await engine.heartbeat())
        await fleet.update_weights(1, push)
        return list(await asyncio.gather(*running))

    done = finish(update())
    assert all(counts_up(one, 2) for one in done)
    assert all(replica.serving for replica in fleet.replicas if replica.index != 3)
    (broken,) = (indices for indices in pushed if 3 in indices)
    assert len(broken) > 1
    assert [index for index in broken if index != 3] in pushed


def test_after_a_broken_push_the_survivors_serve_only_once_another_has_succeeded() -> None:
    engines = writers(3)
    fleet = fleet_of(*engines)
    states: list[list[bool]] = []

    async def push(indices: Sequence[int]) -> None:
        states.append([replica.serving for replica in fleet.replicas])
        if 2 in indices:
            fleet.replicas[2].lose("died under the push")
            raise EngineError("the push broke")

    async def update() -> None:
        await fleet.update_weights(1, push)
        fleet.join([0])

    finish(update())
    assert states == [[True, True, True], [False, False, False]]
    assert [replica.serving for replica in fleet.replicas] == [True, True, False]


def test_a_replica_with_torn_weights_does_not_serve_because_its_devices_come_back() -> None:
    engines = writers(2)
    fleet = fleet_of(*engines)

    async def breaks(indices: Sequence[int]) -> None:
        raise EngineError("the trainer ran out of memory")

    async def works(indices: Sequence[int]) -> None:
        return None

    async def run() -> None:
        with pytest.raises(EngineError, match="out of memory"):
            await fleet.update_weights(1, breaks)
        await fleet.leave([0, 1])
        fleet.join([0, 1])
        assert not any(replica.serving for replica in fleet.replicas)
        await fleet.update_weights(1, works)
        assert all(replica.serving for replica in fleet.replicas)

    finish(run())


def test_torn_weights_that_no_push_explains_are_an_error() -> None:
    engine = Writer(weights_incomplete=True)
    with pytest.raises(IncompleteWeightsError):
        finish(answer(fleet_of(engine), request()))


def test_a_new_engine_serves_only_once_it_has_the_weights_of_the_trainer() -> None:
    fleet = fleet_of(*writers(1))

    async def run() -> Any:
        fleet.on_lost = lambda replica, reason: None
        replica = fleet.replicas[0]
        replica.mark_weights_incomplete()
        replica.lose("dead")
        replica.engine = Writer(version=1)
        replica.reset_for_new_engine()
        fleet.join([0])
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)
        assert not replica.requests
        replica.mark_weights_complete()
        return await running

    assert counts_up(finish(run()), 2)


def test_after_a_push_that_was_cancelled_nobody_serves_with_half_of_it() -> None:
    fleet = fleet_of(*writers(2))

    async def push(indices: Sequence[int]) -> None:
        await asyncio.sleep(3600)

    async def update() -> None:
        updating = asyncio.ensure_future(fleet.update_weights(1, push))
        await turns(10)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)

    finish(update())
    assert [replica.serving for replica in fleet.replicas] == [False, False]
    assert [replica.loading for replica in fleet.replicas] == [False, False]
