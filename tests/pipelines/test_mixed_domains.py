"""The example with six domains: a judge that is killed costs no sample."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml

from examples.mixed import DOMAINS, write_files
from roll.output_dir.trackers import read_records
from tests.faults.test_replicas import process_of
from tests.faults.test_runs import nothing_left, steps_done, wait_for
from tests.runs import ROOT, Command

STEPS, PROMPTS, SIBLINGS = 12, 12, 4
REWARDS = {
    "math": {"math"},
    "code": {"code"},
    "choice": {"choice"},
    "instruct": {"follow"},
    "form": {"form", "value"},
    "praise": {"kindness", "ending"},
}


def task(folder: Path) -> Path:
    """The run of the example, with fewer samples and with models that have learned nothing."""
    write_files(folder, 0, demonstrations=1, asked=1)
    for name, made in (("policy", "model"), ("judge", "judge")):
        shutil.copytree(folder / "warm_start" / name, folder / made)
    text = (ROOT / "examples" / "mixed_domains" / "run.yaml").read_text()
    run = yaml.safe_load(text.replace("outputs/mixed", str(folder)))
    run |= {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "validation": {},
        "checkpoint": {"every": None, "export_hf": False},
        "track": {
            "tensorboard": False,
            "rollouts_every": 1,
            "rollouts_samples": PROMPTS * SIBLINGS,
        },
    }
    run["data"] |= {"prompts_per_step": PROMPTS, "samples_per_prompt": SIBLINGS}
    run["actor_infer"]["strategy"] = {"kind": "hf"}
    # a judge that has learned nothing gives verdicts by a grammar alone
    run["judges"]["reader"] |= {
        "strategy": {"kind": "hf"},
        "grammar": True,
        "health": {"heartbeat_s": 0.2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.mark.slow
def test_a_killed_judge_of_two_rewards_costs_no_sample(tmp_path: Path) -> None:
    command = Command("run", str(task(tmp_path)))
    wait_for(
        lambda: steps_done(tmp_path) >= 2 or command.process.poll() is not None,
        200, "no two steps in 200 s",
    )  # fmt: skip
    assert command.process.poll() is None, command.wait(timeout_s=1)[1]
    os.kill(process_of(command, "ray::judge_reader[0]"), signal.SIGKILL)
    code, output = command.wait()
    assert code == 0, output
    records = [r for r in read_records(tmp_path / "out/metrics.jsonl") if "reward/mean" in r]
    assert [record["step"] for record in records] == list(range(STEPS))
    assert sum(record["judges/reader/lost_replicas"] for record in records) == 1
    rewards = {name for names in REWARDS.values() for name in names}
    for record in records:
        assert all(record[f"reward/{name}/error_rate"] == 0 for name in rewards)
    tags: Counter[str] = Counter()
    for step in range(STEPS):
        rows = read_records(tmp_path / f"out/rollouts/step_{step:06d}.jsonl")
        assert len({row["id"] for row in rows}) == PROMPTS * SIBLINGS
        assert all(row["reward"] is not None for row in rows)
        assert all(row["rewards"].keys() == REWARDS[row["tag"]] for row in rows)
        tags.update(row["tag"] for row in rows)
    assert tags == dict.fromkeys(DOMAINS, STEPS * PROMPTS * SIBLINGS // len(DOMAINS))
    nothing_left(command, 15)
