"""Where requests go: least loaded, sticky, and what happens when a home is full or gone."""

from __future__ import annotations

import asyncio

import pytest

from roll.core.types import GenerateRequest
from roll.rollout.budget import Budget
from roll.rollout.engines import Replica
from roll.rollout.routing import Engines, LeastLoaded, Sticky
from tests.fakes import SAMPLING, ScriptedEngine


def replicas(*loads: tuple[int, int], capacity: int = 4) -> list[Replica]:
    """Replicas with (tokens, sequences) in flight."""
    made = []
    for index, (tokens, sequences) in enumerate(loads):
        replica = ScriptedEngine().replica(index, capacity=capacity)
        replica.in_flight_tokens, replica.in_flight_sequences = tokens, sequences
        made.append(replica)
    return made


def test_the_replica_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    assert LeastLoaded().choose("s", replicas((30, 1), (10, 3), (20, 1))).index == 1


def test_equal_loads_go_to_the_first() -> None:
    assert LeastLoaded().choose("s", replicas((10, 1), (10, 1))).index == 0


def test_a_larger_replica_takes_more() -> None:
    small, large = replicas((10, 1), (15, 1))
    large.capacity = 8
    assert LeastLoaded().choose("s", [small, large]) is large


def test_a_session_stays_where_its_prefix_is_cached() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    assert routing.choose("a", fleet).index == 0
    fleet[0].in_flight_tokens = 1000
    assert routing.choose("a", fleet).index == 0
    assert routing.choose("b", fleet).index == 1


def test_a_full_home_is_left_for_one_request_only() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    routing.choose("a", fleet)
    fleet[0].in_flight_sequences = 4
    assert routing.choose("a", fleet).index == 1
    fleet[0].in_flight_sequences = 0
    assert routing.choose("a", fleet).index == 0


def test_a_session_waits_at_home_when_all_are_full() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    routing.choose("a", fleet)
    for replica in fleet:
        replica.in_flight_sequences = 4
    fleet[0].in_flight_tokens = 1000
    assert routing.choose("a", fleet).index == 0


def test_a_session_moves_when_its_replica_is_gone() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky()
    routing.choose("a", fleet)
    assert routing.choose("a", fleet[1:]).index == 1
    assert routing.choose("a", fleet).index == 1


def test_the_longest_unused_session_is_forgotten_first() -> None:
    fleet, routing = replicas((0, 0), (5, 1)), Sticky(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        routing.choose(session, fleet)
    fleet[0].in_flight_tokens = 1000
    assert [routing.choose(s, fleet).index for s in ("a", "c")] == [0, 0]
    assert routing.choose("b", fleet).index == 1


def test_requests_spread_evenly_over_equal_replicas() -> None:
    engines = [ScriptedEngine(turns=lambda request: 5) for _ in range(3)]
    fleet = Engines([e.replica(i) for i, e in enumerate(engines)], LeastLoaded())

    async def send() -> None:
        requests = [GenerateRequest(f"r{i}", (1,), SAMPLING) for i in range(9)]
        await asyncio.gather(*(fleet.generate(r, session=r.id, timeout_s=5) for r in requests))

    asyncio.run(send())
    assert [len(engine.seen) for engine in engines] == [3, 3, 3]


@pytest.mark.parametrize(
    ("accepted", "running", "started", "room"),
    [
        (0, 0, 0, 5),  # 4 groups and 1 extra
        (3, 1, 4, 1),  # only as many as are still needed, and the extra one
        (0, 2, 2, 3),
        (0, 0, 8, 1),  # 2 x 4 + 1 prompts at most
        (0, 0, 9, 0),
        (5, 0, 5, 0),
    ],
)
def test_a_budget_allows_what_is_needed_and_not_more(
    accepted: int, running: int, started: int, room: int
) -> None:
    budget = Budget(4, extra_prompts=1, max_in_flight=5, max_prompts_factor=2)
    assert budget.may_start(accepted=accepted, running=running, started=started) == room


def test_a_budget_never_exceeds_what_may_be_in_flight() -> None:
    budget = Budget(100, max_in_flight=8)
    assert budget.may_start(accepted=0, running=6, started=6) == 2
