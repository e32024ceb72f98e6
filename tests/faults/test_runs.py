"""Runs as a user starts them: killed, interrupted, broken; what they say and what they leave.

What a dead or stopped process of a run does to it is in `test_table.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from roll.output_dir.trackers import read_records
from tests.runs import Command, without_times, write_task

pytestmark = pytest.mark.slow


KILLED_S = 90
"""In which Ray's daemons end after their driver's SIGKILL: its agents first try for up to 60 s to
tell the likewise killed control store of it."""


def wait_for(what: Callable[[], object], timeout_s: float, why: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


def nothing_left(command: Command, timeout_s: float) -> None:
    """Wait until no process of the command lives."""
    deadline = time.monotonic() + timeout_s
    while left := command.alive():
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.5)


def records(folder: Path) -> list[dict[str, Any]]:
    return read_records(folder / "out/metrics.jsonl")


def steps_done(folder: Path) -> int:
    return sum("reward/mean" in record for record in records(folder))


def started(folder: Path, *overrides: str, steps: int = 1) -> Command:
    """A run that has finished `steps` steps and would go on for long."""
    path = write_task(folder, max_steps=1000, checkpoint={"every": 2}, validation={})
    command = Command("run", str(path), *overrides)
    wait_for(
        lambda: steps_done(folder) >= steps or command.process.poll() is not None,
        180,
        f"no step {steps} in 180 s",
    )
    assert command.process.poll() is None, command.wait()
    return command


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of ten steps that nothing disturbed, without times."""
    folder = tmp_path_factory.mktemp("straight")
    path = write_task(folder, max_steps=10, validation={}, checkpoint={"every": None})
    code, output = Command("run", str(path)).wait()
    assert code == 0, output
    found = list(map(without_times, records(folder)))
    assert len(found) == 10
    return found


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    first = started(tmp_path, steps=3)
    first.process.kill()
    first.wait()
    nothing_left(first, KILLED_S)
    saved = max(p.name for p in (tmp_path / "out/checkpoints").glob("step_*"))
    last = int(saved.removeprefix("step_"))
    second = Command("run", str(tmp_path / "run.yaml"), f"max_steps={last + 2}")
    code, output = second.wait()
    assert code == 0, output
    assert f"step {last} of {last + 2}" in output
    assert [r["step"] for r in read_records(tmp_path / "out/metrics.jsonl")][: last + 2] == list(
        range(last + 2)
    )


def test_ten_steps_equal_five_a_resume_and_five_through_ray(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    parted = write_task(tmp_path, max_steps=10, validation={}, checkpoint={"every": 5})
    for arguments in ([parted, "max_steps=5"], [parted]):
        code, output = Command("run", *map(str, arguments)).wait()
        assert code == 0, output
    assert list(map(without_times, records(tmp_path))) == straight


@pytest.mark.parametrize(
    ("signum", "to_group"),
    [(signal.SIGINT, False), (signal.SIGHUP, True), (signal.SIGINT, True)],
    ids=["SIGINT", "the end of a terminal", "a terminal's Ctrl-C"],
)
def test_a_signal_stops_everything(tmp_path: Path, signum: signal.Signals, to_group: bool) -> None:
    command = started(tmp_path)
    if to_group:
        os.killpg(command.process.pid, signum)
    else:
        command.process.send_signal(signum)
    code, output = command.wait(60)
    assert code == 128 + signum, output
    assert "Traceback" not in output
    assert f"ended by {signum.name}; the same command begins anew (there is no" in output
    nothing_left(command, 15)


def test_a_run_that_is_asked_to_end_saves_its_step_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    path = write_task(tmp_path, max_steps=10, validation={}, checkpoint={"every": None})
    command = Command("run", str(path))
    wait_for(lambda: steps_done(tmp_path) >= 2, 180, "no step 2 in 180 s")
    command.process.send_signal(signal.SIGTERM)
    code, output = command.wait(60)
    assert code == os.EX_TEMPFAIL, output
    assert "of 10 steps are done and saved (SIGTERM); the same command goes on" in output
    nothing_left(command, 15)
    done = steps_done(tmp_path)
    assert done < 10
    code, output = Command("run", str(path)).wait()
    assert code == 0, output
    assert f"step {done} of 10" in output
    assert list(map(without_times, records(tmp_path))) == straight


def test_a_batch_systems_signal_to_all_processes_ends_the_run_soon(tmp_path: Path) -> None:
    command = started(tmp_path)
    for pid in [command.process.pid, *command.alive()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    code, output = command.wait(200)
    assert code in (os.EX_TEMPFAIL, 128 + signal.SIGTERM), output
    assert "SIGTERM" in output
    nothing_left(command, 15)


def test_a_run_ends_behind_the_step_in_which_its_time_is_over(tmp_path: Path) -> None:
    soon = datetime.now() + timedelta(seconds=45)
    path = write_task(tmp_path, max_steps=100_000, validation={}, checkpoint={"every": None})
    command = Command("run", str(path), f"stop_at={soon:%Y-%m-%d %H:%M:%S}")
    code, output = command.wait(200)
    assert code == os.EX_TEMPFAIL, output
    assert datetime.now() >= soon
    assert (tmp_path / "out/checkpoints" / f"step_{steps_done(tmp_path):06d}").is_dir()
    code, output = Command("run", str(path), "stop_at=2020-01-01 00:00").wait()
    assert code == 2, output
    assert "stop_at: 2020-01-01 00:00:00 has passed" in output


@pytest.mark.parametrize("role", ["actor_train", "reference", "reward:digits"])
def test_a_killed_worker_is_named_within_seconds(tmp_path: Path, role: str) -> None:
    command = started(tmp_path)
    title = role.replace(":", "_")
    victims = [pid for pid, text in command.alive().items() if f"ray::{title}[0]" in text]
    assert victims, command.alive()
    begun = time.monotonic()
    os.kill(victims[0], signal.SIGKILL)
    code, output = command.wait(60)
    assert time.monotonic() - begun < 30
    assert code == 1
    assert f"{role}[0]" in output
    nothing_left(command, 15)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"fn": "test_run_rewards:raising"}, "the grader is broken"),
        ({"fn": "test_run_rewards:nan"}, "finite"),
        ({"fn": "test_run_rewards:hanging", "timeout_s": 1, "in_process": False}, "timeout"),
    ],
)
def test_a_broken_reward_ends_the_run_with_its_reason(
    tmp_path: Path, reward: dict[str, object], says: str
) -> None:
    path = write_task(tmp_path, rewards={"broken": reward}, validation={})
    command = Command("run", str(path))
    code, output = command.wait()
    assert code == 1, output
    assert "reward 'broken' failed" in output
    assert says in output
    nothing_left(command, 15)
