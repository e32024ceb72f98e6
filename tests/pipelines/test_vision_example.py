"""The vision quickstart: its task can be learned from its demonstrations, and its run file for
Hugging Face trains, with a model of its script that has learned nothing."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from examples import counting
from tests.runs import ROOT, run_local

STEPS = 2


def test_each_number_that_is_asked_for_is_asked_often_and_taught_often() -> None:
    drawn = counting.boards(random.Random(0))
    asked, trained, taught = (
        Counter(board.count("red") for board in islice(drawn, count))
        for count in (counting.HELD_OUT, counting.TRAIN, counting.DEMONSTRATIONS)
    )
    assert set(asked) == set(trained) == set(taught) == set(range(counting.MOST + 1))
    for number, times in asked.items():
        for others in (trained, taught):
            share = others[number] / others.total()
            assert 0.5 < share / (times / asked.total()) < 2, number


def test_the_teacher_is_right_less_than_half_of_the_time() -> None:
    dice = random.Random(0)
    boards = list(islice(counting.boards(dice), 5000))
    right = sum(counting.teacher(board, dice) == str(board.count("red")) for board in boards)
    assert 0.43 < right / len(boards) < 0.49


@pytest.mark.slow
def test_the_run_file_for_hugging_face_trains(tmp_path: Path) -> None:
    dice, noise = random.Random(0), np.random.default_rng(0)
    drawn = counting.boards(dice)
    for name in ("train", "held_out"):
        rows = [counting.row(next(drawn), noise) for _ in range(16)]
        counting.write(tmp_path / f"{name}.parquet", rows)
    counting.make_model(tmp_path / "model")
    shutil.copytree(ROOT / "examples" / "rlvr_vision_quickstart", tmp_path, dirs_exist_ok=True)
    for name in ("run", "run_hf"):
        path = tmp_path / f"{name}.yaml"
        text = path.read_text(encoding="utf-8").replace("outputs/counting", str(tmp_path))
        path.write_text(text, encoding="utf-8")
    few = ["data.prompts_per_step=8", "data.samples_per_prompt=2", "checkpoint.every=null"]
    few += [f"max_steps={STEPS}", "actor_train.optimizer.warmup_steps=0"]
    records = run_local(tmp_path / "run_hf.yaml", few)
    steps = [record for record in records if "loss/total" in record]
    assert len(steps) == STEPS
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["samples/left_out"] == 0
    assert "val/held_out/mean@1" in records[0]
