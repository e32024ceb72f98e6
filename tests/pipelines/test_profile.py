"""Recorded steps: the timeline of all workers, and what PyTorch did inside some."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import ConfigError
from tests.runs import run_local, without_times, write_task


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_a_recorded_step_shows_which_worker_did_what_when(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=3, validation={})
    plain = run_local(path, [f"output_dir={tmp_path / 'plain'}"])
    recorded = run_local(path, ["profile={steps: [1]}"])
    for one, other in zip(recorded, plain, strict=True):
        assert without_times(one) == without_times(other)
    folder = tmp_path / "out" / "profile" / "step_000001"
    assert [each.name for each in folder.parent.iterdir()] == ["step_000001"]
    assert sorted(each.name for each in folder.iterdir()) == [
        "actor_train[0].json.gz",
        "timeline.json.gz",
    ]
    events = trace(folder / "timeline.json.gz")
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {"driver", "actor_train[0]", "actor_infer[0]", "reward:digits[0]"} <= names.keys()

    def span(process: str, name: str) -> tuple[float, float]:
        (found,) = (
            event
            for event in events
            if event["ph"] == "X" and event["pid"] == names[process] and event["name"] == name
        )
        return found["ts"], found["ts"] + found["dur"]

    phase, call = span("driver", "train"), span("actor_train[0]", "train")
    assert phase[0] <= call[0] < call[1] <= phase[1]
    whole = span("driver", "step")
    assert whole[0] <= phase[0] < phase[1] <= whole[1]
    operators = {event["name"] for event in trace(folder / "actor_train[0].json.gz")}
    assert "aten::mm" in operators or "aten::addmm" in operators


def test_memory_of_gpus_is_not_recorded_without_one(tmp_path: Path) -> None:
    path = write_task(tmp_path, profile={"steps": [0], "kind": "memory"})
    with pytest.raises(ConfigError, match=r"profile\.kind: memory records GPU memory"):
        run_local(path)
