"""Trackers against the real packages of their services, without a network: two sessions of a run
are one run there, and every metric is at its step."""

from __future__ import annotations

import json
import os
import re
import site
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.packages.interpreters import interpreter_with

pytestmark = pytest.mark.slow  # packages are installed first
ROOT = Path(__file__).parents[2]
STEPS = {step: {"reward/mean": step / 4, "val/held_out/mean@1": float(step)} for step in range(4)}


def sent(folder: Path, kind: str, package: str, kwargs: dict[str, Any], **env: str) -> Path:
    """Send two sessions; return the folder that the tracker keeps."""
    command = [interpreter_with(package), str(ROOT / "tests" / "packages" / "two_sessions.py")]
    command += [kind, str(folder / "run"), json.dumps(kwargs), *site.getsitepackages()]
    (folder / "run").mkdir()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "switched off" not in done.stderr, done.stderr[-3000:]
    return folder / "run" / "trackers" / kind


def test_wandb(tmp_path: Path) -> None:
    kept = sent(tmp_path, "wandb", "wandb", {}, WANDB_MODE="offline")
    sessions = sorted((kept / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in sessions} == {f"run-{(kept / 'id').read_text()}.wandb"}
    for file, told in zip(sessions, (b"0.25", b"0.75"), strict=True):
        assert re.search(b"reward/mean.{1,6}" + re.escape(told), file.read_bytes(), re.DOTALL)


def test_mlflow(tmp_path: Path) -> None:
    kwargs = {"tracking_uri": f"file:{tmp_path / 'store'}"}
    kept = sent(tmp_path, "mlflow", "mlflow-skinny", kwargs, MLFLOW_ALLOW_FILE_STORE="true")
    [run] = (tmp_path / "store").glob(f"*/{(kept / 'id').read_text()}")
    for name in STEPS[0]:
        lines = (run / "metrics" / name.replace("@", ":")).read_text().splitlines()
        told = [line.split() for line in lines]
        expected = [(step, record[name]) for step, record in STEPS.items()]
        assert [(int(step), float(value)) for _, value, step in told] == expected
    assert (run / "params" / "model.path").read_text() == "m"


def test_swanlab(tmp_path: Path) -> None:
    kept = sent(tmp_path, "swanlab", "swanlab", {"mode": "offline"})
    sessions = sorted(kept.glob("run-*/*.swanlab"))
    assert {file.name for file in sessions} == {f"run-{(kept / 'id').read_text()}.swanlab"}
    assert len(sessions) == 2
    for file in sessions:
        assert all(name.encode() in file.read_bytes() for name in STEPS[0])


def test_clearml(tmp_path: Path) -> None:
    env = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(tmp_path / "cache")}
    kept = sent(tmp_path, "clearml", "clearml", {}, **env)
    sessions = sorted((tmp_path / "cache").glob("**/offline-*/task.json"))
    assert len(sessions) == 2
    assert (kept / "id").read_text() in {file.parent.name for file in sessions}
    told: dict[int, dict[str, float]] = {}
    for file in sessions:
        assert '"name": "model/path"' in file.read_text()
        for line in (file.parent / "metrics.jsonl").read_text().splitlines():
            for one in json.loads(line):
                name = f"{one['metric']}/{one['variant']}"
                told.setdefault(one["iter"], {})[name] = one["value"]
    assert told == STEPS


def test_trackio(tmp_path: Path) -> None:
    kept = sent(tmp_path, "trackio", "trackio", {}, TRACKIO_DIR=str(tmp_path / "db"))
    with sqlite3.connect(tmp_path / "db" / "sorting.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name.rpartition("-")[2] for name, _, _ in rows} == {(kept / "id").read_text()}
    assert {step: json.loads(metrics) for _, step, metrics in rows} == STEPS
