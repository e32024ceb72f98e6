"""Shares of time in which replicas have work, on a clock that the test moves."""

from __future__ import annotations

import pytest

from roll.rollout.fleet.replica import Replica, State
from roll.rollout.fleet.utilisation import Utilisation
from roll.rollout.fleet.vitals import Vitals
from tests.unit.rollout.test_fleet import Writer


def replicas(count: int) -> list[Replica]:
    return [Replica(index, Writer(), capacity=8) for index in range(count)]


def test_the_busiest_of_several_replicas_is_named() -> None:
    fleet, looked = replicas(3), Utilisation()
    assert not looked.take(fleet, 100.0), "nothing is known before the first look"
    for replica, until_s in zip(fleet, (102.0, 109.0, 104.0), strict=True):
        replica.vitals.occupy(1, 100.0)
        replica.vitals.occupy(0, until_s)
    assert looked.take(fleet, 110.0).values_by_name() == pytest.approx(
        {
            "perf/busiest_replica": 1,
            "perf/replicas_busy_max": 0.9,
            "perf/replicas_busy_mean": 0.5,
            "perf/replicas_busy_min": 0.2,
        }
    )
    assert looked.take(fleet, 120.0)["perf/replicas_busy_max"].value() == 0, "counted once"


def test_a_new_engine_begins_at_zero_and_a_lost_one_does_not_count() -> None:
    fleet, looked = replicas(2), Utilisation()
    fleet[0].vitals.occupy(1, 0.0)
    looked.take(fleet, 10.0)
    fleet[0].vitals = Vitals()
    fleet[0].vitals.occupy(1, 15.0)
    fleet[1].state = State.LOST
    assert looked.take(fleet, 20.0)["perf/replicas_busy_min"].value() == 0.5
