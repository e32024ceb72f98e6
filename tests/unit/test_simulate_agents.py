"""The simulation of agents: known times, and what spare episodes and limits are for."""

from __future__ import annotations

import pytest

from benchmarks.simulate_agents import rows
from benchmarks.simulation.agents import HANG_S, Latency, Setting, lockstep_s


def table(sigma: float, hangs: float) -> dict[str, float]:
    setting = Setting(4, 4, 5, 2, Latency(sigma, hangs))
    return {row[2]: float(row[3]) for row in rows(setting, 2)}


def test_where_all_is_equal_nothing_waits_for_anything() -> None:
    found = table(0.0, 0.0)
    assert found == dict.fromkeys(found, 10)


def test_an_episode_waits_for_itself_alone() -> None:
    found = table(1.5, 0.0)
    assert found["lockstep"] > found["each for itself"] > found["1 spare"] >= found["2 spare"]


def test_a_limit_saves_what_hangs() -> None:
    found = table(0.5, 0.1)
    assert found["lockstep"] > HANG_S
    assert found["each for itself"] > HANG_S
    assert found["limit of 20 s"] < 100


@pytest.mark.parametrize("turns", [1, 5])
def test_lockstep_hangs_once_for_each_episode_that_hangs(turns: int) -> None:
    alone = Setting(1, 1, turns, 1, Latency(0.0, 1.0))
    assert lockstep_s(alone, 0) == pytest.approx(turns + (turns - 1) + HANG_S)
