"""Runs with parts that users bring: the same numbers as built-in ones, errors with their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import RollError
from tests.runs import run_local, without_times, write_task

OWN: dict[str, Any] = {
    "advantage": {"kind": "tests.own_parts:GroupRelative"},
    "loss": [
        {"kind": "tests.own_parts:Clipped"},
        {"kind": "tests.own_parts:Nearness", "coef": 0.001},
    ],
}
BUILT_IN: dict[str, Any] = {
    "advantage": {"kind": "grpo"},
    "loss": [{"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001, "estimator": "k2"}],
}
UNTOLD = ("ratio/mean", "approx_kl", "clip_fraction")
"""Metrics of the built-in loss that one's own does not report."""


def small(folder: Path, algorithm: dict[str, Any], **changes: Any) -> Path:
    changes = {"max_steps": 2, "validation": {}, "checkpoint": {"export_hf": False}} | changes
    return write_task(folder, algorithm=algorithm, **changes)


def test_an_advantage_and_a_loss_equal_the_built_in_ones_to_the_bit(tmp_path: Path) -> None:
    several = {"pool": "all", "samples_per_update": 8, "optimizer": {"lr": 1e-3}}
    own, built_in = (
        [
            without_times(record)
            for record in run_local(small(tmp_path / name, algorithm, actor_train=several))
        ]
        for name, algorithm in (("own", OWN), ("built_in", BUILT_IN))
    )
    for mine, theirs in zip(own, built_in, strict=True):
        if "loss/Nearness" in mine:
            mine["loss/kl"] = mine.pop("loss/Nearness")
        assert mine == {name: value for name, value in theirs.items() if name not in UNTOLD}
    assert any(record.get("loss/kl", 0) > 0 for record in own)
    assert len(own) == 2


def test_a_loss_that_raises_ends_the_run_with_the_key_and_the_line(tmp_path: Path) -> None:
    path = small(tmp_path, {"loss": [{"kind": "tests.own_parts:Raising"}]}, reference=None)
    with pytest.raises(RollError) as caught:
        run_local(path)
    told = str(caught.value)
    assert "algorithm.loss.0: tests.own_parts:Raising raised an error on samples of step 0" in told
    assert "return TokenLoss(terms.logprobs_BT * batch.bonus)" in told
