"""A run that is killed in the middle of a checkpoint that is written beside its steps."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.killed_writing import SECOND
from tests.runs import ROOT, run_local, without_times, write_task


@pytest.mark.slow
def test_it_goes_on_from_the_one_before_as_if_nothing_had_been(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        max_steps=3,
        checkpoint={"every": 1, "asynchronous": True, "export_hf": False},
    )
    at_once = ["checkpoint.asynchronous=false", f"output_dir={tmp_path / 'straight'}"]
    straight = run_local(path, at_once)
    command = [sys.executable, "-m", "tests.faults.killed_writing", str(path)]
    ended = subprocess.run(command, cwd=ROOT, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    left = tmp_path / "out/checkpoints"
    assert {folder.name for folder in left.iterdir()} == {"step_000001", SECOND}
    assert (left / SECOND / "state.json").is_file()
    resumed = run_local(path)
    assert [r["step"] for r in resumed] == list(range(4))
    assert list(map(without_times, resumed)) == list(map(without_times, straight))
    assert {folder.name for folder in left.iterdir()} == {"step_000002", "step_000003"}
