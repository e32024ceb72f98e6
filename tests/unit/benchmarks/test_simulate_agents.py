"""The simulation of agents: known times, and what spare episodes and limits are for."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.simulate_agents import rows
from benchmarks.simulate_agents_scale import scale_row
from benchmarks.simulation.agents import (
    HANG_S,
    Latency,
    Setting,
    bound_s,
    lockstep_s,
    play,
    train,
)


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


def test_no_step_is_faster_than_the_bound_and_a_free_fleet_reaches_it() -> None:
    for capacity in (1, 2, 5, 0):
        setting = Setting(3, 4, 6, 2, Latency(1.0), capacity)
        for seed in range(3):
            played = play(setting, seed)
            assert bound_s(setting, played.books) <= played.step_s + 1e-9
            if not capacity:
                assert played.step_s == pytest.approx(bound_s(setting, played.books))


def test_full_engines_take_the_time_of_all_turns() -> None:
    """Eight episodes take five turns of a second, four at a time; the last one waits a second."""
    setting = Setting(2, 4, 5, 2, Latency(0.0), capacity=2)
    played = play(setting, 0)
    assert played.step_s == pytest.approx(11)
    assert bound_s(setting, played.books) == pytest.approx(10)
    assert played.books.turns == 40


def test_training_is_hidden_behind_the_episodes_of_later_steps() -> None:
    setting = Setting(2, 2, 5, 2, Latency(0.0))  # with room for the episodes of two steps
    together = partial(train, setting, 0, train_s=4.0, steps=4)
    assert together(staleness=0) == pytest.approx(10 + 4)
    # The episodes of the first two steps begin at 0, those of the others when a version is there:
    # at 14 and at 18.
    assert 4 * together(staleness=1) == pytest.approx(18 + 10 + 4)


def test_a_row_of_the_large_table_counts_every_turn() -> None:
    replicas, episodes, turns, step_s, of_bound, same, *_ = scale_row(2, 40, 3, 64)
    assert (replicas, episodes, turns, same) == ("2", "40", "3", "1.00")
    assert float(step_s) > 3
    assert float(of_bound) == 1
