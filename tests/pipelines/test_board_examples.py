"""The run files of the examples on boards train, with a model of their scripts that has learned
nothing and a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demonstrations import Game, make_model, tasks
from examples.lake import LAKE
from examples.tiny_model import write_jsonl
from tests.runs import ROOT, run_local


@pytest.mark.parametrize("file", ["run", "gigpo"])
@pytest.mark.parametrize("game", [LAKE], ids=lambda game: game.name)
def test_the_examples_on_boards_run_two_steps(game: Game, file: str, tmp_path: Path) -> None:
    path = ROOT / f"examples/{game.example}/{file}.yaml"
    make_model(tmp_path / "model", game)
    write_jsonl(tmp_path / "train.jsonl", list(tasks(game))[:16])
    own = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out", "max_steps=2"]
    own += [f"data.sources.0.path={tmp_path}/train.jsonl", "validation.sets.held_out.seeds=4"]
    small = ["actor_infer.strategy.kind=hf", "data.prompts_per_step=4", "checkpoint.every=null"]
    small += [
        "actor_train.optimizer.warmup_steps=0",
        "data.samples_per_prompt=4",
        "actor_train.samples_per_update=8",
    ]
    records = run_local(path, [*own, *small])
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["samples/left_out"] == 0
        assert record[f"reward/{game.name}/mean"] == record[f"reward/{game.name}/success"]
    assert 0 <= records[0]["val/held_out/mean@1"] <= 1
