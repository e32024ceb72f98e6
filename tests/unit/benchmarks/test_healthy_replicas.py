"""The default health settings in virtual time: healthy replicas stay, sick ones are found soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.healthy_replicas import found_after, main, scenario
from benchmarks.simulation.faults import Sickness
from benchmarks.simulation.world import Outcome, Scenario, simulate
from roll.config.sections.rollout import HealthConfig


def small(median: int, push_s: float, replicas: int = 8, capacity: int = 16) -> Scenario:
    one = scenario(replicas, median, push_s, steps=3, capacity=capacity)
    assert one.limits == HealthConfig()
    return one


@pytest.mark.parametrize(("median", "push_s"), [(1000, 0.5), (1000, 20.0), (4000, 5.0)])
def test_no_replica_is_lost_without_a_fault(median: int, push_s: float) -> None:
    outcome = simulate(small(median, push_s))
    assert (outcome.lost_replicas, outcome.moved_requests) == (0, 0)


def test_prefill_that_takes_minutes_after_a_push_costs_no_replica() -> None:
    one = small(4000, 5.0, replicas=5)
    slowly = replace(one.model, prefill_tokens_per_s=one.model.prefill_tokens_per_s / 20)
    outcome = simulate(replace(one, model=slowly))
    assert outcome.lost_replicas == 0


def test_replicas_that_share_their_pace_among_many_sequences_are_not_slow() -> None:
    one = small(1000, 0.5, capacity=32)
    outcome = simulate(replace(one, staleness=0, model=replace(one.model, knee=2)))
    assert outcome.lost_replicas == 0


def with_sickness(sickness: Sickness, at_s: float = 20.0) -> Outcome:
    sickness = replace(sickness, replica=2, at_s=at_s)
    return simulate(replace(small(2000, 2.0, replicas=6), sickness=sickness))


@pytest.mark.parametrize(
    ("sickness", "within_s"),
    [
        (Sickness("crash"), 2),
        (Sickness("hang"), 63),
        (Sickness("slow", 20), 15),
        (Sickness("slow", 200), 15),
    ],
)
def test_a_sick_replica_is_given_up_in_time_and_no_other(
    sickness: Sickness, within_s: float
) -> None:
    outcome = with_sickness(sickness)
    assert {index for _, index in outcome.losses} == {2}
    assert float(found_after(outcome)) <= within_s


def test_a_replica_that_gets_slow_at_prefill_after_a_push_is_given_up_too() -> None:
    healthy = simulate(small(2000, 2.0, replicas=6))
    just_after_the_first_push_s = healthy.steps[0].end_s + 0.5
    outcome = with_sickness(Sickness("slow", 50), just_after_the_first_push_s)
    assert {index for _, index in outcome.losses} == {2}
    assert float(found_after(outcome)) <= 60


def test_a_replica_that_is_four_times_slower_is_kept() -> None:
    assert with_sickness(Sickness("slow", 4)).lost_replicas == 0


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--replicas=4", "--medians=500", "--pushes=0.5", "--steps=1", "--capacity=8"])
    out = capsys.readouterr().out
    assert "| 4 | 500 | 0.5 |" in out
    assert "20 times slower" in out
    assert "never" not in out
