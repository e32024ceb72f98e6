"""Whole simulated runs: what they promise of the scheduler, and that nothing is ever lost."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate_rollout import main
from benchmarks.simulation.faults import Faults
from benchmarks.simulation.lengths import LogNormal, Pareto
from benchmarks.simulation.study import study
from benchmarks.simulation.world import Scenario, simulate
from roll.config.sections.rollout import HealthConfig

SMALL = Scenario(4, LogNormal(32), prompts_per_step=32, steps=9, max_new_tokens=512, queue=64)
"""One sample a step for each place of a replica."""


@pytest.mark.slow
def test_two_steps_of_staleness_double_the_throughput_and_come_close_to_the_oracle() -> None:
    synchronous, asynchronous = study(SMALL, [2], generation_share=0.7)
    assert synchronous.speedup == 1
    assert synchronous.staleness_shares == {0: 1.0}
    assert asynchronous.speedup > 2.2
    assert 0.95 < asynchronous.of_oracle <= 1
    assert set(asynchronous.staleness_shares) == {0, 1, 2}


def test_generation_takes_the_share_of_a_synchronous_step_that_was_asked_for() -> None:
    (row,) = study(SMALL, [0], generation_share=0.7)
    trained_s = row.outcome.scenario.train_s + SMALL.model.pause_s
    assert trained_s / row.outcome.step_s == pytest.approx(0.3, abs=0.02)


def test_a_trainer_that_is_given_is_not_calibrated() -> None:
    (row,) = study(replace(SMALL, train_s=7.0, steps=2), [0], generation_share=None)
    assert row.outcome.scenario.train_s == 7.0
    first, _second = row.outcome.steps
    assert first.end_s - first.begin_s == pytest.approx(7.0 + SMALL.model.pause_s)


@pytest.mark.parametrize(("separate", "lengths"), [(False, Pareto(32, 1.2)), (True, LogNormal(32))])
def test_crashes_hangs_and_stragglers_cost_no_sample(
    separate: bool, lengths: LogNormal | Pareto
) -> None:
    faults = Faults(mean_between_s=300, slow_share=0.3, seed=1)
    scenario = replace(
        SMALL, lengths=lengths, staleness=2, train_s=20.0, steps=5, faults=faults,
        separate_siblings=separate, limits=HealthConfig(max_restarts=99),
    )  # fmt: skip
    outcome = simulate(scenario)
    assert outcome.faults.crashes
    assert outcome.faults.hangs
    assert outcome.faults.slow
    assert outcome.moved_requests
    assert outcome.lost_replicas > 1
    assert [work.prompts for work in outcome.work] == [32] * 5


def test_equal_scenarios_give_equal_runs() -> None:
    scenario = replace(
        SMALL, staleness=1, train_s=10.0, steps=2, faults=Faults(400),
        limits=HealthConfig(max_restarts=99),
    )  # fmt: skip
    one, other = simulate(scenario), simulate(scenario)
    assert one.work == other.work
    assert one.decoding == other.decoding
    assert simulate(replace(scenario, seed=1)).work != one.work


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    def peak(steps: int) -> int:
        tracemalloc.start()
        small = replace(SMALL, replicas=2, prompts_per_step=16, lengths=LogNormal(8))
        simulate(replace(small, staleness=1, train_s=5.0, steps=steps))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(27) < 1.2 * peak(9)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "table.md", tmp_path / "picture.png"
    main(
        f"--replicas 1,2 --staleness 0,1 --steps 2 --median 8 --samples-per-replica 16 "
        f"--table {table} --picture {picture}".split()
    )
    assert "rollout in virtual time" in capsys.readouterr().out
    assert table.read_text().count("\n| ") == 4
    assert picture.stat().st_size > 10_000
