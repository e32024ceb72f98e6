"""Where requests go: least loaded, sticky, and what happens when a home is full or gone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.types import GenerateRequest
from roll.rollout.budget import Budget
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica, State
from roll.rollout.fleet.routing import LeastLoaded, Loads, RoutingPolicy, Sticky
from tests.fakes import SAMPLING, ScriptedEngine


def replicas(*loads: tuple[int, int], capacity: int = 4) -> list[Replica]:
    """Replicas with (tokens, sequences) in flight."""
    made = []
    for index, (tokens, sequences) in enumerate(loads):
        replica = ScriptedEngine().replica(index, capacity=capacity)
        replica.in_flight_tokens, replica.in_flight_sequences = tokens, sequences
        made.append(replica)
    return made


def chosen(routing: RoutingPolicy, session: str, fleet: list[Replica]) -> int | None:
    replica = routing.choose(session, Loads(fleet))
    return None if replica is None else replica.index


def test_the_replica_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    assert chosen(LeastLoaded(), "s", replicas((30, 1), (10, 3), (20, 1))) == 1


def test_equal_loads_go_to_the_first() -> None:
    assert chosen(LeastLoaded(), "s", replicas((10, 1), (10, 1))) == 0


def test_a_larger_replica_takes_more() -> None:
    fleet = replicas((10, 1), (15, 1))
    fleet[1].capacity = 8
    assert chosen(LeastLoaded(), "s", fleet) == 1


def test_full_replicas_and_those_that_do_not_serve_are_not_chosen() -> None:
    fleet = replicas((1, 4), (30, 1), (2, 1))
    fleet[2].enter(State.LOST)
    assert chosen(LeastLoaded(), "s", fleet) == 1
    fleet[1].enter(State.AWAY)
    assert chosen(LeastLoaded(), "s", fleet) is None


def test_a_session_stays_where_its_prefix_is_cached() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    assert chosen(routing, "a", fleet) == 0
    fleet[0].in_flight_tokens = 1000
    assert chosen(routing, "a", fleet) == 0
    assert chosen(routing, "b", fleet) == 1


def test_a_full_home_is_left_for_one_request_only() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    chosen(routing, "a", fleet)
    fleet[0].in_flight_sequences = 4
    assert chosen(routing, "a", fleet) == 1
    fleet[0].in_flight_sequences = 0
    assert chosen(routing, "a", fleet) == 0


def test_a_session_moves_when_its_replica_is_gone() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    chosen(routing, "a", fleet)
    fleet[0].enter(State.LOST)
    assert chosen(routing, "a", fleet) == 1
    fleet[0].enter(State.SERVING)
    assert chosen(routing, "a", fleet) == 1


def test_the_longest_unused_session_is_forgotten_first() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        chosen(routing, session, fleet)
    fleet[0].in_flight_tokens = 1000
    assert [chosen(routing, s, fleet) for s in ("a", "c")] == [0, 0]
    assert chosen(routing, "b", fleet) == 1


def test_a_hundred_thousand_episodes_at_once_all_stay_at_home() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    loads, names = Loads(fleet), [f"0/t:{number}/0" for number in range(100_000)]
    for name in names:
        routing.choose(name, loads)
    fleet[0].in_flight_tokens = 1000
    loads.update(fleet[0])
    assert {routing.choose(name, loads) for name in names} == {fleet[0]}


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40), st.booleans())))
@settings(max_examples=80)
def test_the_index_of_loads_finds_what_a_search_finds(
    count: int, changes: list[tuple[int, int, bool]]
) -> None:
    fleet = replicas(*[(0, 0)] * count)
    loads = Loads(fleet)
    for index, tokens, serving in changes:
        replica = fleet[index % count]
        replica.in_flight_tokens = tokens
        replica.state = State.SERVING if serving else State.LOST
        loads.update(replica)
        best = min((r for r in fleet if r.open), key=lambda r: (r.load, r.index), default=None)
        assert loads.least() is best


def test_requests_spread_evenly_over_equal_replicas() -> None:
    engines = [ScriptedEngine(turns=lambda request: 5) for _ in range(3)]
    fleet = Fleet([e.replica(i) for i, e in enumerate(engines)])

    async def send() -> None:
        requests = [GenerateRequest(f"r{i}", (1,), SAMPLING) for i in range(9)]
        await asyncio.gather(*(fleet.generate(r, session=r.id, timeout_s=5) for r in requests))

    asyncio.run(send())
    assert [len(engine.seen) for engine in engines] == [3, 3, 3]


@pytest.mark.parametrize(
    ("staleness", "ahead", "outstanding", "running", "room"),
    [
        (0, 0, 0, 0, 5),  # 4 groups and 1 extra
        (0, 0, 4, 1, 1),  # only the extra one
        (0, 0, 2, 2, 3),
        (0, 0, 0, 6, 2),  # 8 at most in flight
        (0, 1, 0, 0, 0),  # the step is collected, its weights are not trained yet
        (2, 0, 4, 0, 8),  # three steps' groups, and 1 extra, but 8 at most in flight
        (2, 1, 4, 0, 5),
        (2, 1, 9, 0, 0),
    ],
)
def test_a_budget_allows_what_will_be_used_in_time_and_not_more(
    staleness: int, ahead: int, outstanding: int, running: int, room: int
) -> None:
    budget = Budget(4, staleness, extra=1, max_in_flight=8)
    found = budget.may_begin(outstanding=outstanding, running=running, ahead=ahead)
    assert found == room
