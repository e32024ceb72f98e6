"""From a config to a pipeline: what is looked at before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.commands.launch import launch, print_end
from roll.commands.rollout import rollout_config, settings_of_training
from roll.config import load_config
from roll.core.errors import CheckpointError, SettingsChangedError
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
