"""The run file that users copy trains with the model of its script and a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.random_model import make_model
from tests.runs import ROOT, run_local


def test_the_example_of_an_own_environment_runs_two_steps(tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0)
    own = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out", "max_steps=2"]
    small = ["actor_infer.strategy.kind=hf", "sampling.max_new_tokens=24"]
    records = run_local(ROOT / "examples/agentic_custom_env/run.yaml", [*own, *small])
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["samples/left_out"] == 0
        assert 0 <= record["reward/coins/success"] <= 1
        assert record["reward/coins/mean"] == pytest.approx(record["reward/coins/success"])
    row = json.loads((tmp_path / "out/rollouts/step_000000.jsonl").open().readline())
    assert "weigh" in row["prompt"]
    assert "the coins in the left pan" in row["prompt"], "the docstring of the tool"
