"""Runs that learn from rewards of single steps alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import RewardError
from roll.pipeline.rlvr import RlvrPipeline
from tests.runs import run_local, write_task

PRM: dict[str, Any] = {"steps": {"fn": "test_run_rewards:steps", "process": True}}


def task(folder: Path, **changes: Any) -> Path:
    return write_task(
        folder,
        **{
            "rewards": PRM,
            "reference": None,
            "algorithm": {"loss": [{"kind": "ppo_clip"}]},
            "validation": {},
            "checkpoint": {"export_hf": False},
            "max_steps": 2,
        }
        | changes,
    )


class Tokens(RlvrPipeline):
    """A pipeline that has all tokens on the driver."""

    def open(self) -> None:
        super().open()
        assert self.needs_tokens


def test_a_model_learns_from_rewards_of_steps_alone(tmp_path: Path) -> None:
    path = task(
        tmp_path,
        max_steps=12,
        data={
            "sources": [{"path": str(tmp_path / "train.jsonl")}],
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "max_prompt_tokens": 32,
        },
        actor_train={"pool": "all", "optimizer": {"lr": 5e-3}},
    )
    records = run_local(path, pipeline=Tokens)[:-1]
    assert records[0]["reward/mean"] == 0
    assert records[0]["grad_norm"] > 0
    first, last = (
        r["process/reward_mean"] / r["process/steps_mean"] for r in (records[0], records[-1])
    )
    assert last > first + 0.2


def test_steps_are_written_beside_their_responses(tmp_path: Path) -> None:
    algorithm = {"advantage": {"kind": "reinforce", "gamma": 0.9}, "loss": [{"kind": "ppo_clip"}]}
    run_local(task(tmp_path, algorithm=algorithm, max_steps=1))
    (dump,) = (tmp_path / "out" / "rollouts").iterdir()
    for line in dump.read_text().splitlines():
        row = json.loads(line)
        digits = [float(letter.isdigit()) for letter in row["response"]]
        assert [value for _, value in row.get("steps", [])] == digits
        assert all(end <= row["response_tokens"] for end, _ in row.get("steps", []))


def test_waiting_groups_keep_their_steps_in_a_checkpoint(tmp_path: Path) -> None:
    changes = {"rollout": {"max_staleness": 1}, "checkpoint": {"every": 1, "export_hf": False}}
    path = task(tmp_path, max_steps=3, **changes)
    run_local(path)
    for late in ("step_000003", "step_000002"):
        folder = tmp_path / "out" / "checkpoints" / late
        if folder.exists():
            folder.rename(tmp_path / late)
    records = run_local(path, ["checkpoint.keep_last=3"])
    assert records[-2]["process/steps_mean"] > 0


def test_a_reward_that_did_not_say_so_ends_the_run(tmp_path: Path) -> None:
    path = task(tmp_path, rewards={"steps": {"fn": "test_run_rewards:steps"}})
    with pytest.raises(RewardError, match="process: true"):
        run_local(path)
