"""Checkpoints survive kills between any two renames, strange files, and a run that goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import CheckpointError
from roll.output_dir.checkpoints import Checkpoints, RunState, load_state, require_written


def write(checkpoints: Checkpoints, step: int, **carried: float) -> None:
    with checkpoints.writing(RunState(step=step, sampler={}, carried=carried)) as folder:
        (folder / "weights").write_text(str(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_foreign_dot_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / ".nfs0001").mkdir()
    write(Checkpoints(tmp_path, CheckpointConfig()), 1)
    assert names(tmp_path) == {".DS_Store", ".nfs0001", "step_000001"}


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    write(checkpoints, 4)
    # As `writing` leaves it when it dies after the first rename of a replacement.
    (tmp_path / "step_000004").rename(tmp_path / ".old_step_000004")
    (tmp_path / ".writing_step_000004").mkdir()
    assert checkpoints.find("auto") == tmp_path / "step_000004"
    assert names(tmp_path) == {"step_000004"}
    # And after the second: the old one has a twin.
    (tmp_path / ".old_step_000004").mkdir()
    checkpoints.tidy()
    assert names(tmp_path) == {"step_000004"}


def test_a_run_that_goes_back_sets_newer_checkpoints_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2))
    for step in (10, 20):
        write(checkpoints, step)
    checkpoints.abandon_newer(10)
    write(checkpoints, 20)
    checkpoints.abandon_newer(10)
    assert names(tmp_path) == {
        "step_000010",
        "abandoned_step_000020",
        "abandoned_step_000020.2",
    }
    write(checkpoints, 11)
    assert [step for step, _ in checkpoints.complete()] == [10, 11]


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    write(checkpoints, 30)
    write(checkpoints, 10)
    assert names(tmp_path) == {"step_000010", "step_000030"}


def test_the_best_are_kept_besides_the_newest(tmp_path: Path) -> None:
    config = CheckpointConfig(keep_last=1, keep_best=1, best_metric="val/t/mean@1")
    checkpoints = Checkpoints(tmp_path, config)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.2], start=1):
        write(checkpoints, step, **{"val/t/mean@1": score})
    assert [step for step, _ in checkpoints.complete()] == [2, 4]
    assert load_state(tmp_path / "step_000002").carried == {"val/t/mean@1": 0.9}


def test_a_file_that_only_another_node_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"meta\.json, but it is not here; .* all nodes share"
    ):
        require_written(tmp_path / "actor_train" / "meta.json")
