"""Runs with parts that users bring: the same numbers as built-in ones, errors with their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config import load_config
from roll.core.errors import ConfigError, DataError, RollError
from tests.runs import Command, run_local, without_times, write_task

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


def test_own_parts_of_rollout_and_data_equal_the_built_in_ones_to_the_bit(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "rollout": {
            "loop": {"kind": "tests.own_parts:Plain"},
            "filters": [{"kind": "tests.own_parts:Equal"}],
        },
        "curriculum": {"kind": "tests.own_parts:Band", "low": 0.4, "pass_score": 0.2},
    }
    built_in: dict[str, Any] = {
        "rollout": {"filters": [{"kind": "equal_rewards"}]},
        "curriculum": {"low": 0.4, "pass_score": 0.2},
    }
    records = []
    for name, parts in (("own", own), ("built_in", built_in)):
        path = write_task(
            tmp_path / name, rollout=parts["rollout"], validation={}, checkpoint={}, max_steps=8
        )
        settings = yaml.safe_load(path.read_text())
        settings["data"]["curriculum"] = parts["curriculum"]
        path.write_text(yaml.safe_dump(settings))
        records.append([without_times(record) for record in run_local(path)])
    for mine, theirs in zip(*records, strict=True):
        theirs.pop("curriculum/in_band_fraction", None)
        assert mine == theirs
    assert any(record.get("curriculum/skipped_prompts", 0) > 0 for record in records[0])


def test_text_that_a_loop_gives_is_not_trained_on(tmp_path: Path) -> None:
    loop = {"kind": "tests.own_parts:SecondThoughts"}
    path = small(tmp_path, OWN, rollout={"loop": loop}, validation={"every": 2})
    records = run_local(path)
    assert len(records) == 2
    for record in records:
        assert record["response_tokens/max"] <= 12
        assert record["mismatch/logprob_abs_max"] < 1e-4, "log-probs of all trained tokens agree"


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        ("Few", "returned 1 responses for prompt train:"),
        ("Stumbling", "raised an error for prompt train:"),
    ],
)
def test_a_wrong_loop_ends_the_run_with_its_key(tmp_path: Path, loop: str, told: str) -> None:
    path = small(tmp_path, {}, rollout={"loop": {"kind": f"tests.own_parts:{loop}"}})
    with pytest.raises(RollError) as caught:
        run_local(path)
    assert f"rollout.loop: tests.own_parts:{loop} {told}" in str(caught.value)
    if loop == "Stumbling":
        assert "IndexError" in str(caught.value)


def test_a_template_a_tracker_and_a_pipeline_leave_a_run_as_it_is(tmp_path: Path) -> None:
    records = []
    for name in ("own", "built_in"):
        path = small(tmp_path / name, {})
        settings = yaml.safe_load(path.read_text())
        if name == "own":
            settings["pipeline"] = "tests.own_parts:Renamed"
            settings["data"]["chat_template"] = {"kind": "tests.own_parts:Markers"}
            settings["track"]["trackers"] = [
                {"kind": "tests.own_parts:Table", "kwargs": {"digits": 4}}
            ]
        path.write_text(yaml.safe_dump(settings))
        records.append([without_times(record) for record in run_local(path)])
    assert records[0] == records[1]
    written = (tmp_path / "own" / "out" / "trackers" / "Table" / "table.csv").read_text()
    rewards = [f"{i},{record['reward/mean']:.4f}" for i, record in enumerate(records[0])]
    assert written.splitlines() == rewards
    again = load_config(tmp_path / "own" / "out" / "config.yaml").config
    assert again.pipeline == "tests.own_parts:Renamed"


def test_a_pipeline_has_options_and_steps_of_its_own(tmp_path: Path) -> None:
    path = small(tmp_path, {}, pipeline="tests.own_parts:BestFirst", kept=1)
    assert [record["kept"] for record in run_local(path)] == [4, 4]


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        ("rlvrr", "pipeline = 'rlvrr': unknown; did you mean 'rlvr'?"),
        ("tests.own_parts:BestFrst", "tests.own_parts has no 'BestFrst'; did you mean 'BestFirst'"),
        ("tests.own_parts:Plain", "tests.own_parts:Plain is no class that derives from a pipeline"),
        ("tests.own_parts:BestFirst", "keptt = 1: unknown key; did you mean 'kept'?"),
    ],
)
def test_a_wrong_pipeline_or_option_is_refused(tmp_path: Path, pipeline: str, told: str) -> None:
    path = small(tmp_path, {}, pipeline=pipeline, keptt=1)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}:")
    assert told in str(caught.value)


def test_a_template_that_raises_is_told_with_row_and_line(tmp_path: Path) -> None:
    path = small(tmp_path, {})
    settings = yaml.safe_load(path.read_text())
    settings["data"]["chat_template"] = {"kind": "tests.own_parts:Mute"}
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(DataError) as caught:
        run_local(path)
    told = "data.chat_template: tests.own_parts:Mute raised an error for "
    assert str(caught.value).startswith(told)
    assert 'return str(messages[0]["words"])' in str(caught.value)


def test_a_chance_that_is_none_ends_the_run_with_its_key(tmp_path: Path) -> None:
    path = small(tmp_path, {})
    settings = yaml.safe_load(path.read_text())
    settings["data"]["curriculum"] = {"kind": "tests.own_parts:Sure"}
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(RollError, match=r"data\.curriculum: tests\.own_parts:Sure returned "):
        run_local(path)


def test_a_loss_that_raises_ends_the_run_with_the_key_and_the_line(tmp_path: Path) -> None:
    path = small(tmp_path, {"loss": [{"kind": "tests.own_parts:Raising"}]}, reference=None)
    with pytest.raises(RollError) as caught:
        run_local(path)
    told = str(caught.value)
    assert "algorithm.loss.0: tests.own_parts:Raising raised an error on samples of step 0" in told
    assert "return TokenLoss(terms.logprobs_BT * batch.bonus)" in told


@pytest.mark.slow
def test_workers_on_ray_find_classes_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "my_ray_parts.py").write_text(
        "from tests.own_parts import Clipped, GroupRelative\n\n\n"
        "class MyLoss(Clipped):\n    bound: int = 3\n\n\n"
        "class MyAdvantage(GroupRelative):\n    pass\n"
    )
    algorithm = {
        "advantage": {"kind": "my_ray_parts:MyAdvantage"},
        "loss": [{"kind": "my_ray_parts:MyLoss", "bound": 4}],
    }
    path = small(tmp_path, algorithm)
    settings = yaml.safe_load(path.read_text())
    settings.pop("reference")
    path.write_text(yaml.safe_dump(settings))
    code, output = Command("run", str(path)).wait()
    assert code == 0, output
    assert "2 steps; everything is in" in output
    assert f"roll report {tmp_path / 'out'} makes a page of it" in output
    code, output = Command("merge", str(tmp_path / "out"), str(tmp_path / "merged")).wait()
    assert code == 0, output


@pytest.mark.slow
def test_an_error_in_a_worker_on_ray_has_the_users_line(tmp_path: Path) -> None:
    path = small(tmp_path, {"loss": [{"kind": "tests.own_parts:Raising"}]})
    settings = yaml.safe_load(path.read_text())
    settings.pop("reference")
    path.write_text(yaml.safe_dump(settings))
    code, output = Command("run", str(path)).wait()
    assert code == 1, output
    assert "algorithm.loss.0: tests.own_parts:Raising raised an error" in output
    assert "terms.logprobs_BT * batch.bonus" in output
