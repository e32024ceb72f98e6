"""Real runs that are ill on purpose raise the alarm that names their illness, and no other; healthy
ones raise none. `benchmarks/sick_runs.py` does all of them; here are the quick ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sick.cases import SICK, WELL, Case
from benchmarks.sick.running import run_case
from benchmarks.sick.task import make_base

pytestmark = pytest.mark.slow
QUICK = (
    "constant reward",
    "engine and trainer apart",
    "learning rate 100 times too high",
    "truncation",
    "stale samples",
    "slow replica",
    "leaking reward",
    "not a number",
    "healthy, grpo",
    "healthy, two replicas",
)
CASES = {case.name: case for case in (*SICK, *WELL)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sick") / "model"
    make_base(folder)
    return folder


@pytest.mark.parametrize("case", [CASES[name] for name in QUICK], ids=QUICK)
def test_a_run_is_named_with_its_cause(case: Case, model: Path, tmp_path: Path) -> None:
    outcome = run_case(case, tmp_path, model)
    assert outcome.error is None
    assert [alarm.rule for alarm in outcome.alarms] == list(case.alarms), outcome.alarms


def test_there_are_twelve_sick_runs_and_ten_healthy_ones() -> None:
    assert len({case.name for case in SICK}) == 12
    assert all(case.alarms for case in SICK)
    assert len({case.name for case in WELL}) == 10
    assert not any(case.alarms for case in WELL)
