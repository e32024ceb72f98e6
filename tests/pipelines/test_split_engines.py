"""Runs whose engine is split over several processes, started as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.output_dir.trackers import read_records
from roll.strategy.available import status
from tests.runs import Command, write_task

SGLANG = pytest.param(
    "sglang", marks=pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", SGLANG])
def test_roll_run_trains_with_an_engine_of_two_tensor_parallel_ranks(
    tmp_path: Path, engine: str
) -> None:
    path = write_task(
        tmp_path,
        pools={"train": "0", "infer": "0-1"},
        cluster={"devices_per_node": 2},
        actor_train={"pool": "train", "optimizer": {"lr": 1e-3}},
        actor_infer={"pool": "infer", "strategy": {"kind": engine, "tp": 2}},
        reference=None,
        algorithm={},
        validation={},
        max_steps=2,
        track={"tensorboard": False, "verify_weights": "always"},
    )
    code, output = Command("run", str(path)).wait(timeout_s=400)
    assert code == 0, output
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    steps = [record for record in records if "mismatch/logprob_abs_max" in record]
    assert len(steps) == 2
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in steps)
