"""Pools that overlap in part, through Ray: a replica makes room while its device trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.output_dir.trackers import read_records
from tests.runs import Command, write_task


@pytest.mark.slow
def test_inference_shrinks_off_the_training_device_and_grows_back(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        max_steps=5,
        validation={},
        reference=None,
        algorithm={"correction": {"weight": {"upper": 2.0}}},
        cluster={"devices_per_node": 2},
        pools={"train": "0", "infer": "0-1"},
        actor_train={"pool": "train"},
        actor_infer={"pool": "infer", "strategy": {"kind": "hf"}},
        sampling={"max_new_tokens": 60, "ignore_eos": True},
        rollout={"max_staleness": 1},
        checkpoint={"every": None, "export_hf": False},
        track={"tensorboard": False, "rollouts_every": 1},
    )
    code, output = Command("run", str(path)).wait()
    assert code == 0, output
    records = [r for r in read_records(tmp_path / "out/metrics.jsonl") if "reward/mean" in r]
    assert len(records) == 5
    assert all(record["staleness/max"] <= 1 for record in records)
    assert max(record["staleness/max"] for record in records) == 1
    # What the replica on device 0 was at goes on elsewhere, with the tokens that it had written.
    assert sum(record["rollout/moved_requests"] for record in records) > 0
    for step in range(5):
        rows = read_records(tmp_path / f"out/rollouts/step_{step:06d}.jsonl")
        assert [row["response_tokens"] for row in rows] == [60] * 16
