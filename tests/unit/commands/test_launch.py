"""From a config to a pipeline: what is looked at before anything is started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.cli.run_files import told_of_report
from roll.commands.launch import launch, print_end
from roll.commands.replay import _trained_again
from roll.commands.rollout import rollout_config, settings_of_training
from roll.config import load_config
from roll.core.errors import CheckpointError, ConfigError, SettingsChangedError
from roll.output_dir.checkpoints import Checkpoints, RunState
from roll.output_dir.resume import mark_export
from roll.pipeline.rlvr import RlvrPipeline
from tests.rlvr_file import RUN, loaded
from tests.runs import write_task
from tests.unit.runtime.written_checkpoints import writing


class Unprepared(RlvrPipeline):
    """Needs no data: what is looked at is the folder."""

    @classmethod
    def prepare(cls, config: Any) -> Any:
        return config, None


@pytest.mark.slow
def test_a_finished_run_below_the_home_folder_is_compared_with_what_is_asked_for(
    tmp_path: Path,
) -> None:
    home = f"output_dir=~/{os.path.relpath(tmp_path / 'out', Path.home())}"
    path = write_task(tmp_path, max_steps=2)
    config = load_config(path, [home]).config
    checkpoints = Checkpoints(tmp_path / "out" / "checkpoints", config.checkpoint)
    with writing(checkpoints, RunState(step=2, sampler={})) as folder:
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (tmp_path / "out" / "hf").mkdir()
    mark_export(tmp_path / "out" / "hf", 2)
    pipelines = {"rlvr": Unprepared}
    assert launch(load_config(path, [home]), pipelines)["status"] == "finished"
    # As if killed during the copy of the last checkpoint.
    upload = f"checkpoint.upload=file://{tmp_path}/there"
    assert launch(load_config(path, [home, upload]), pipelines)["status"] == "finished"
    assert (tmp_path / "there" / "step_000002" / "state.json").exists()
    passed = "stop_at=2020-01-31 18:00"  # refused only where there is something left to do
    assert launch(load_config(path, [home, passed]), pipelines)["status"] == "finished"
    with pytest.raises(ConfigError, match=r"stop_at: .* has passed"):
        launch(load_config(path, [home, passed, "max_steps=3"]), pipelines)
    with pytest.raises(SettingsChangedError, match="seed: 0 -> 3"):
        launch(load_config(path, [home, "seed=3"]), pipelines)


def test_a_run_does_not_begin_on_a_checkpoint_without_optimizers(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=4)
    config = load_config(path).config
    checkpoints = Checkpoints(tmp_path / "out" / "checkpoints", config.checkpoint)
    with writing(checkpoints, RunState(step=2, sampler={}, optimizer=False)) as folder:
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(CheckpointError, match=r"no state of the optimizers .*restart_optimizer"):
        launch(load_config(path), {"rlvr": Unprepared})


class Unread(RlvrPipeline):
    """Has data that must not be read."""

    @classmethod
    def prepare(cls, config: Any) -> Any:
        raise AssertionError("the data is read")


def test_a_run_that_cannot_begin_is_refused_before_its_data_is_read(tmp_path: Path) -> None:
    path = write_task(tmp_path).rename(tmp_path / "config.yaml")
    pipelines = {"rlvr": Unread}
    with pytest.raises(ConfigError, match="what you wrote there would be lost"):
        launch(load_config(path, [f"output_dir={tmp_path}"]), pipelines)
    passed = ["stop_at=2020-01-31 18:00:00"]
    with pytest.raises(ConfigError, match=r"stop_at: .* has passed"):
        launch(load_config(path, passed), pipelines)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"resume: never would rename .*/out,"):
        launch(load_config(path, ["resume=never"]), pipelines)


def test_samples_in_a_folder_of_any_name_are_replayed(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    for name in ("a #1", "a: b", 'say "é😀"'):
        assert _trained_again(path, (), tmp_path / name).rollout.replay == str(tmp_path / name)


def test_the_command_after_a_run_names_the_folder_as_a_shell_finds_it() -> None:
    told = told_of_report("~/my runs/a")
    assert shlex.split(told)[:3] == ["roll", "report", str(Path.home() / "my runs/a")]


def test_the_end_of_a_run_says_each_score_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    moved = {"first": 0.621, "last": 0.618}
    summary = {
        "validation": {"val/a/mean@1": moved, "val/b/mean@1": moved},
        "verdict": "val/a/mean@1 went from 0.621 to 0.618.",
        "steps": 3,
    }
    print_end(loaded(path), summary)
    told = capsys.readouterr().err.splitlines()[:2]
    assert told == ["val/b/mean@1: 0.621 -> 0.618", "val/a/mean@1 went from 0.621 to 0.618."]


def test_samples_without_training_leave_out_what_concerns_it_and_say_so(tmp_path: Path) -> None:
    config = load_config(write_task(tmp_path, validation={})).config
    assert settings_of_training(rollout_config(config, None, None)) == [
        "checkpoint.every",
        "checkpoint.keep_last",
        "checkpoint.export_hf",
    ]
    upload = {"upload": "s3://bucket/run"}
    own = write_task(tmp_path, checkpoint=upload, validation={"every": 3})
    config = load_config(own).config
    assert settings_of_training(config) == ["checkpoint.upload", "validation"]
    assert rollout_config(config, None, None).checkpoint.upload is None
