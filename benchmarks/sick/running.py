"""Runs of cases in this process, and the alarms that they raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sick.cases import Case
from benchmarks.sick.launchers import FaultyLauncher
from benchmarks.sick.task import write_run
from roll.commands.launch import PIPELINES
from roll.config import load_config
from roll.core.errors import RollError
from roll.core.threads.loop_thread import LoopThread
from roll.report.health.alarms import Alarm, alarms
from roll.report.health.rules import RULES
from roll.report.read import read_run


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    steps: int
    alarms: Sequence[Alarm]
    error: str | None
    """Error that ended the run; None if it reached its last step."""


def run_case(case: Case, folder: Path, model: Path) -> Outcome:
    """Run a case in `folder` and return what its page would say."""
    path = write_run(folder, model, case.changes, answers=case.answers, seed=case.seed)
    error = None
    with FaultyLauncher(case.engine, case.replicas) as launcher, LoopThread("rollout") as loop:
        config = load_config(path).config
        pipeline = PIPELINES[config.pipeline]
        config, data = pipeline.prepare(config)
        try:
            pipeline(config, launcher, loop, platform="cpu", data=data).run()
        except RollError as ended:
            error = str(ended)
    return outcome_of(folder / "out", error)


def outcome_of(output: Path, error: str | None = None) -> Outcome:
    """Return what the page of a run that has ended says."""
    run = read_run(output, output.name)
    return Outcome(len(run.training), alarms(run.records, RULES), error)
