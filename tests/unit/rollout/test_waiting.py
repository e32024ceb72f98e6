"""The line of requests for a replica: own prefixes first, and nobody is passed over for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.types import GenerateRequest
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.routing import Sticky
from roll.rollout.fleet.waiting import PATIENCE, Waiting, WaitingLine
from tests.fakes import SAMPLING, ScriptedEngine

REPLICAS = 3


def on_loop(work: Callable[[], None]) -> None:
    """Run this on an event loop, which futures need."""

    async def run() -> None:
        work()

    asyncio.run(run())


def waiting(name: str, moved: bool = False) -> Waiting:
    seat: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return Waiting(name, GenerateRequest(name, (1,), SAMPLING), seat, moved)


STEP = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([None, 0, 1, 2]), st.booleans()),
    st.tuples(st.just("take"), st.integers(0, REPLICAS - 1), st.just(False)),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.just(False)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_a_replica_takes_what_a_list_of_all_that_wait_says(
    steps: list[tuple[str, int | None, bool]],
) -> None:
    def play() -> None:
        line = WaitingLine(REPLICAS)
        every: list[tuple[Waiting, int | None]] = []  # who waits, and its home
        passed: dict[str, int] = {}  # how many got a place before it that came later
        for what, number, moved in steps:
            if what == "add":
                one = waiting(f"{len(every)}", moved)
                line.add(one, number)
                if moved:
                    every.insert(0, (one, None))
                else:
                    every.append((one, number))
            elif what == "cancel" and every:
                assert number is not None
                one, _ = every.pop(number % len(every))
                one.seat.cancel()
            elif what == "take":
                assert number is not None
                taken = line.next_for(number)
                if not every:
                    assert taken is None
                    continue
                first, _ = every[0]
                late = first.moved or passed.get(first.session, 0) >= PATIENCE * REPLICAS
                own = [each for each, home in every if home == number]
                expected = first if late or not own else own[0]
                assert taken is expected
                line.serve(expected)
                for each, _ in every[: [one for one, _ in every].index(expected)]:
                    passed[each.session] = passed.get(each.session, 0) + 1
                every = [each for each in every if each[0] is not expected]
            assert bool(line) == bool(every)
        assert line.clear() == [one for one, _ in every if not one.seat.done()]
        assert not line

    on_loop(play)


def test_those_that_were_cancelled_do_not_make_the_others_wait_longer() -> None:
    def play() -> None:
        line = WaitingLine(REPLICAS)
        for number in range(100):
            one = waiting(f"gone {number}")
            line.add(one, 0)
            one.seat.cancel()
        line.add(waiting("hung"), 2)
        for number in range(PATIENCE * REPLICAS):
            line.add(waiting(f"{number}"), 0)
            taken = line.next_for(0)
            assert taken is not None
            assert taken.session == f"{number}"
            line.serve(taken)
        line.add(waiting("one more"), 0)
        taken = line.next_for(0)
        assert taken is not None
        assert taken.session == "hung"

    on_loop(play)


def test_a_request_whose_replica_hangs_is_passed_over_for_a_while_only() -> None:
    def play() -> None:
        line = WaitingLine(REPLICAS)
        hung = waiting("hung")
        line.add(hung, 2)
        passed = 0
        for number in range(100):
            line.add(waiting(f"{number}"), 0)
            taken = line.next_for(0)
            assert taken is not None
            line.serve(taken)
            if taken is hung:
                break
            passed += 1
        assert passed == PATIENCE * REPLICAS

    on_loop(play)


def test_turns_of_many_episodes_come_back_to_their_replica() -> None:
    """Far more episodes than places: with first come, first served, one in four would."""
    homes, kept, turns = dict[str, int](), [0], 5
    episodes, replicas = 60, 4

    class Noting(ScriptedEngine):
        index = 0

        async def generate(self, request: GenerateRequest) -> Any:
            episode = request.id.partition(".")[0]
            kept[0] += homes.get(episode) == self.index
            homes[episode] = self.index
            return await super().generate(request)

    engines = [Noting(turns=lambda request: 3 + (request.seed or 0) % 5) for _ in range(replicas)]

    async def play() -> None:
        made = []
        for index, engine in enumerate(engines):
            engine.index = index
            made.append(engine.replica(index, capacity=2))
        fleet = Fleet(made, Sticky())

        async def episode(number: int) -> None:
            for turn in range(turns):
                name = f"e{number}.{turn}"
                request = GenerateRequest(name, (1,), SAMPLING, seed=number * 7 + turn)
                await fleet.generate(request, session=f"e{number}", timeout_s=30)
                for _ in range(number % 3):
                    await asyncio.sleep(0)

        await asyncio.gather(*(episode(number) for number in range(episodes)))

    asyncio.run(asyncio.wait_for(play(), 30))
    assert sum(len(engine.seen) for engine in engines) == episodes * turns
    assert kept[0] > 0.8 * episodes * (turns - 1)
