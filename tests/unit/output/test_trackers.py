"""Trackers of users and of services: what they get, and that none of them harms the run."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll.commands.launch import print_end
from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.lifecycle import TrackConfig, TrackerConfig
from roll.core.errors import EngineMissingError
from roll.output_dir.trackers import Record, TrackedRun, check_trackers, open_trackers, read_records
from roll.output_dir.trackers.behind import MAX_WAITING, Behind
from roll.output_dir.trackers.services import mlflow_settings
from tests.runs import run_local, write_task

HERE = f"{__name__}:Mine"
ROOT = Path(__file__).parents[3]


def test_mlflow_gets_settings_by_names_that_it_takes() -> None:
    named = {"a+b": 1, "a@b": 2, "f(x)": 3, "x" * 300: "long", "y" * 10: "z" * 9000}
    found = mlflow_settings({"environments": named, "seed": 3})
    assert len(found) == 6
    assert all(re.fullmatch(r"[\w./ :-]{1,250}", name) for name in found)
    assert (found["environments.a:b"], found["environments.a:b:1"]) == ("1", "2")
    assert found["environments.f:x:"] == "3"
    assert max(map(len, found.values())) == 6000
    assert found["seed"] == "3"


class Mine:
    """A tracker of a user; `wrong` says where it fails."""

    def __init__(self, run: TrackedRun, wrong: str = "", wait_s: float = 0.0) -> None:
        self.wrong, self.wait_s = wrong, wait_s
        self.file = run.folder / "told.jsonl"
        self.tell(begin=run.recall(), first=run.first_step, run=f"{run.project}/{run.name}")
        run.remember(f"step {run.first_step}")
        self.fail("open")

    def tell(self, **what: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def fail(self, where: str) -> None:
        if self.wrong == where:
            raise RuntimeError(f"fails at {where}")

    def log(self, step: int, record: Record) -> None:
        time.sleep(self.wait_s)
        self.fail("log")
        self.tell(step=step, **record)

    def close(self) -> None:
        self.fail("close")
        self.tell(closed=True)


class Signals(Mine):
    """A tracker that takes over Ctrl-C where it may, as some services' packages do."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Session:
    seconds: float
    failed: list[str]


def session(folder: Path, *trackers: Mapping[str, Any], first: int = 0, steps: int = 2) -> Session:
    """A session of a run with these trackers."""
    config = TrackConfig(tensorboard=False, trackers=tuple(TrackerConfig(**t) for t in trackers))
    begun_s = time.monotonic()
    opened = open_trackers(config, folder, first_step=first, max_steps=9, resolved={"seed": 3})
    with opened as all_of_them:
        for step in range(first, first + steps):
            all_of_them.log(step, {"reward/mean": step / 4})
        took_s = time.monotonic() - begun_s
    return Session(took_s, opened.failed)


def told(folder: Path, name: str = "Mine") -> list[dict[str, Any]]:
    lines = (folder / "trackers" / name / "told.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_class_of_a_user_gets_every_step_and_knows_its_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "sort" / "run"
    folder.mkdir(parents=True)
    session(folder, {"kind": HERE})
    session(folder, {"kind": HERE, "name": "again", "project": "mine"}, first=2)
    assert told(folder) == [
        {"begin": None, "first": 0, "run": "roll/sort-run"},
        {"step": 0, "reward/mean": 0.0},
        {"step": 1, "reward/mean": 0.25},
        {"closed": True},
        {"begin": "step 0", "first": 2, "run": "mine/again"},
        {"step": 2, "reward/mean": 0.5},
        {"step": 3, "reward/mean": 0.75},
        {"closed": True},
    ]


def test_the_class_of_the_docs_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
    (tmp_path / "my_tracker.py").write_text(text.split("```python\n")[1].split("```")[0])
    sys.path.insert(0, str(tmp_path))
    try:
        session(tmp_path, {"kind": "my_tracker:Table", "kwargs": {"digits": 3}})
    finally:
        sys.path.remove(str(tmp_path))
    assert (tmp_path / "trackers/Table/table.csv").read_text() == "0,0.000\n1,0.250\n"


def test_two_of_a_kind_have_a_folder_each(tmp_path: Path) -> None:
    session(tmp_path, {"kind": HERE}, {"kind": HERE})
    assert told(tmp_path)[1:] == told(tmp_path, "Mine-2")[1:]


@pytest.mark.parametrize(
    ("wrong", "when"),
    [("open", "when it was made"), ("log", "at step 0"), ("close", "when it was closed")],
)
def test_one_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, wrong: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"kind": HERE, "kwargs": {"wrong": wrong}}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    place = f"{__file__}:{1 + next(i for i, line in enumerate(lines) if 'fails at {where' in line)}"
    with caplog.at_level(logging.ERROR):
        failed = session(tmp_path, broken, {"kind": HERE}).failed
    [record] = caplog.records
    first, second, third = record.getMessage().splitlines()[:3]
    assert first == f"the tracker Mine failed {when} ({place}) and is switched off; the run goes on"
    assert second == "Traceback (most recent call last):"
    assert __file__ in third, "the user's code comes first"
    assert failed == [f"Mine failed {when}: RuntimeError: fails at {wrong} ({place})"]
    assert len(told(tmp_path, "Mine-2")) == 4
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [0, 1]


class Miscalls(Mine):
    """A tracker that a package fails which it calls."""

    def log(self, step: int, record: Record) -> None:
        json.loads("{" if step == 3 else "0")


def test_a_failure_in_a_package_names_the_line_that_called_it(tmp_path: Path) -> None:
    [line] = session(tmp_path, {"kind": f"{__name__}:Miscalls"}, steps=6).failed
    assert line.startswith("Miscalls failed at step 3: JSONDecodeError: ")
    assert f" ({__file__}:" in line


def test_the_end_of_a_run_names_trackers_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_task(tmp_path, max_steps=2, validation={})
    track = f"track.trackers=[{{kind: {HERE!r}, kwargs: {{wrong: log}}}}]"
    run_local(path, [track])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["failed_trackers"][0].startswith("Mine failed at step 0: RuntimeError: fails")
    print_end(load_config(path).config, summary)
    assert "tracker Mine failed at step 0: RuntimeError: fails at log" in capsys.readouterr().err


def test_a_slow_one_delays_no_step_and_loses_nothing(tmp_path: Path) -> None:
    assert session(tmp_path, {"kind": HERE, "kwargs": {"wait_s": 0.3}}, steps=4).seconds < 0.9
    assert [one["step"] for one in told(tmp_path) if "step" in one] == [0, 1, 2, 3]


class Hangs:
    """A tracker that hangs at the first record until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def log(self, step: int, record: Record) -> None:
        self.go.wait(60)

    def close(self) -> None: ...


def log_all(behind: Behind, steps: int) -> None:
    for step in range(steps):
        behind.log(step, {})


def test_one_that_hangs_is_given_up() -> None:
    hanging = Hangs()
    behind = Behind(lambda: hanging, close_timeout_s=0.2)
    try:
        with pytest.raises(TimeoutError, match=f"{MAX_WAITING} records wait to be sent"):
            log_all(behind, MAX_WAITING + 2)
    finally:
        hanging.go.set()
    patient = Hangs()
    other = Behind(lambda: patient, close_timeout_s=0.2)
    try:
        other.log(0, {})
        with pytest.raises(TimeoutError, match=r"has not finished within 0.2 s"):
            other.close()
    finally:
        patient.go.set()


def test_signals_stay_those_of_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    session(tmp_path, {"kind": f"{__name__}:Signals"})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_file_names_trackers(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    base = ROOT / "examples" / "rlvr_quickstart" / "run.yaml"
    run.write_text(
        f"defaults: [{base}]\ntrack: {{trackers: [{{kind: {HERE!r}, kwargs: {{a: 1}}}}]}}\n"
    )
    [tracker] = load_config(run).config.track.trackers
    assert tracker == TrackerConfig(kind=HERE, kwargs={"a": 1})
    run.write_text(f"defaults: [{base}]\ntrack: {{wandb_project: p}}\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: track.wandb_project = 'p': now it is `tr"):
        load_config(run)


def test_what_cannot_work_is_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"unknown service 'wanbd'; did you mean 'wandb'\?"):
        TrackerConfig(kind="wanbd")
    with pytest.raises(ConfigError, match="has no 'Yours'"):
        session(tmp_path, {"kind": f"{__name__}:Yours"})
    with pytest.raises(ConfigError, match=r"0\.kwargs: .* argument 'wait'"):
        session(tmp_path, {"kind": HERE, "kwargs": {"wait": 1}})
    check_trackers(TrackConfig(trackers=(TrackerConfig(kind=HERE),)))
    with pytest.raises(EngineMissingError, match="is not installed: `pip install swanlab`"):
        check_trackers(TrackConfig(trackers=(TrackerConfig(kind="swanlab"),)))
