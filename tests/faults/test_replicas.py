"""Inference replicas that are killed or stopped in the middle of a step cost no sample."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from roll.output_dir.trackers import read_records
from tests.faults.test_runs import nothing_left, steps_done, wait_for
from tests.runs import Command, write_task

pytestmark = pytest.mark.slow

STEPS, SAMPLES = 40, 16


def start(folder: Path, engine: str) -> Command:
    """Two replicas that are busy for a while in each step."""
    path = write_task(
        folder,
        max_steps=STEPS,
        validation={},
        reference=None,
        algorithm={},
        checkpoint={"every": None, "export_hf": False},
        cluster={"devices_per_node": 2},
        pools={"all": "0-1", "one": "0"},
        actor_infer={"pool": "all", "strategy": {"kind": engine}},
        actor_train={"pool": "one"},
        sampling={"max_new_tokens": 200, "ignore_eos": True},
        rollout={
            "siblings": "separate",
            "health": {"heartbeat_s": 0.2, "timeout_s": 8, "restart_timeout_s": 120},
        },
        track={"tensorboard": False, "rollouts_every": 1, "rollouts_samples": SAMPLES},
    )
    return Command("run", str(path))


def process_of(command: Command, title: str) -> int:
    found = [pid for pid, text in command.alive().items() if title in text]
    assert found, command.alive()
    return found[0]


def test_one_replica_killed_and_another_stopped_in_one_step_cost_no_sample(tmp_path: Path) -> None:
    command = start(tmp_path, "vllm")
    wait_for(
        lambda: steps_done(tmp_path) >= 1 or command.process.poll() is not None,
        300, "no step in 300 s",
    )  # fmt: skip
    os.kill(process_of(command, "ray::actor_infer[0]"), signal.SIGKILL)
    os.kill(process_of(command, "ray::actor_infer[1]"), signal.SIGSTOP)
    code, output = command.wait(timeout_s=400)
    assert code == 0, output
    for index in (0, 1):
        assert f"inference replica {index} is lost" in output, output
        assert f"inference replica {index} is back" in output, output
    records = [r for r in read_records(tmp_path / "out/metrics.jsonl") if "reward/mean" in r]
    assert [record["step"] for record in records] == list(range(STEPS))
    assert sum(record["rollout/lost_replicas"] for record in records) == 2
    for step in range(STEPS):
        rows = read_records(tmp_path / f"out/rollouts/step_{step:06d}.jsonl")
        assert len({row["id"] for row in rows}) == SAMPLES
        assert {row["response_tokens"] for row in rows} == {200}
    nothing_left(command, 15)
