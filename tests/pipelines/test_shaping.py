"""Shaping and filters in a run: what the records say, and that a resumed run repeats it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import run_local, without_times, write_task

ALL_OF_IT = {
    "advantage": {"kind": "reinforce"},
    "reward_shaping": [
        {"kind": "overlong_penalty", "max_tokens": 12, "buffer_tokens": 6, "penalty": 0.5},
        {"kind": "length_penalty", "coef": 0.1, "pass_score": 0.1},
        {"kind": "normalize", "mean": "running", "std": "running"},
        {"kind": "clip", "low": -2.0, "high": 2.0},
    ],
    "masks": [{"kind": "difficulty", "low": 0.0, "high": 0.9}],
    "sample_weights": [{"kind": "difficulty"}, {"kind": "length"}],
    "advantage_shaping": [{"kind": "whiten"}, {"kind": "clip", "limit": 1.5}],
    "kl_in_reward": {"coef": 0.1, "target": 0.001, "horizon": 100},
}


def test_a_run_with_all_shaping_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "my_filter.py").write_text(
        "def keep(group, least):\n    return len(group.samples) >= least\n"
    )
    path = write_task(
        tmp_path,
        validation={},
        max_steps=4,
        algorithm=ALL_OF_IT,
        checkpoint={"every": 2, "export_hf": False},
        rollout={"filters": [{"kind": "custom", "fn": "my_filter:keep", "kwargs": {"least": 2}}]},
    )
    straight = run_local(path, [f"output_dir={tmp_path / 'straight'}"])
    half = tmp_path / "half"
    run_local(path, [f"output_dir={half}"])
    (half / "checkpoints" / "step_000004").rename(tmp_path / "gone")
    saved = json.loads((half / "checkpoints" / "step_000002" / "state.json").read_text())
    assert saved["sampler"]["shaping"]["reward/normalize"]["count"] == 2 * 16
    resumed = run_local(path, [f"output_dir={half}"])
    for one, other in zip(straight, resumed, strict=True):
        assert without_times(one) == without_times(other)
    coefs = [record["kl/coef"] for record in straight]
    assert coefs[0] == 0.1
    assert len(set(coefs)) == 4
    assert straight[0]["kl/in_reward"] == pytest.approx(0, abs=1e-6)
    assert straight[0]["shaping/reward/normalize/running_std"] > 0


def test_samples_that_are_all_masked_leave_the_weights_alone(tmp_path: Path) -> None:
    algorithm = {"masks": [{"kind": "difficulty", "low": 5.0, "high": 6.0}]}
    path = write_task(tmp_path, validation={}, max_steps=1, algorithm=algorithm)
    (record, *_) = run_local(path)
    assert record["shaping/mask/masked_fraction"] == 1
    assert record["loss/policy"] == 0
    assert record["grad_norm"] == 0
