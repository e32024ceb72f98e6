"""The run files of the examples on boards train, with a model of their scripts that has learned
nothing and a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demonstrations import Game, make_model, tasks
from examples.lake import LAKE
from examples.sokoban import SOKOBAN
from examples.tic_tac_toe import make_tokenizer
from examples.tiny_model import write_jsonl, write_model
from tests.runs import ROOT, run_local

SMALL = [
    "max_steps=2",
    "actor_infer.strategy.kind=hf",
    "actor_train.optimizer.warmup_steps=0",
    "actor_train.samples_per_update=8",
    "data.prompts_per_step=4",
    "data.samples_per_prompt=4",
    "checkpoint.every=null",
]


@pytest.mark.parametrize(
    ("game", "file"),
    [(LAKE, "run"), (LAKE, "gigpo"), (SOKOBAN, "run")],
    ids=["lake", "lake-gigpo", "sokoban"],
)
def test_the_examples_on_boards_run_two_steps(game: Game, file: str, tmp_path: Path) -> None:
    path = ROOT / f"examples/{game.example}/{file}.yaml"
    make_model(tmp_path / "model", game)
    write_jsonl(tmp_path / "train.jsonl", list(tasks(game))[:16])
    own = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out"]
    own += [f"data.sources.0.path={tmp_path}/train.jsonl", "validation.sets.held_out.seeds=4"]
    records = run_local(path, [*own, *SMALL])
    for record in steps_of(records):
        assert record["samples/left_out"] == 0
        assert record[f"reward/{game.name}/mean"] == record[f"reward/{game.name}/success"]
    assert 0 <= records[0]["val/held_out/mean@1"] <= 1


def test_the_example_of_self_play_runs_two_steps(tmp_path: Path) -> None:
    write_model(tmp_path / "model", make_tokenizer(), positions=512)
    own = [f"model.path={tmp_path}/model", f"output_dir={tmp_path}/out"]
    own += ["validation.sets.perfect.seeds=4"]
    records = run_local(ROOT / "examples/agentic_self_play/run.yaml", [*own, *SMALL])
    steps_of(records)
    assert -1 <= records[0]["val/perfect/mean@1"] <= 0


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of both steps, in which engine and trainer agree."""
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == 2
    assert all(step["mismatch/logprob_abs_max"] < 1e-5 for step in steps)
    return steps
