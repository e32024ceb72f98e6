"""The output folder: writable or a clear error; finished or what is missing; paths for workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from roll.cli import reported
from roll.config import RlvrConfig, load_config
from roll.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    SettingsChangedError,
    UserError,
)
from roll.output_dir.checkpoints import Checkpoints, RunState
from roll.output_dir.path_resolution import absolute_paths
from roll.output_dir.resume import (
    check_optimizer,
    finished_summary,
    make_writable,
    mark_export,
    refuse_other_settings,
    set_aside,
)
from roll.output_dir.summary import read_summary
from roll.output_dir.whole_file import replace_file
from tests.runs import write_task
from tests.unit.runtime.written_checkpoints import writing


@pytest.mark.parametrize("below", ["", "/below"])
def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match=r"output_dir: .* cannot be written"):
        make_writable(Path(f"{tmp_path}/out{below}"))


def test_an_output_dir_is_made_and_left_empty(tmp_path: Path) -> None:
    make_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_checkpoint_without_optimizers_is_trained_on_only_when_asked(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=4)
    config = load_config(path).config
    checkpoints = Checkpoints(tmp_path / "out" / "checkpoints", config.checkpoint)
    with writing(checkpoints, RunState(step=2, sampler={}, optimizer=False)):
        pass
    with pytest.raises(CheckpointError, match=r"no state of the optimizers .*restart_optimizer"):
        check_optimizer(config)
    check_optimizer(load_config(path, ["checkpoint.restart_optimizer=true"]).config)
    check_optimizer(load_config(path, ["max_steps=2"]).config)  # only the export may be missing
    check_optimizer(load_config(path, ["resume=never"]).config)


def test_never_sets_the_earlier_run_aside(tmp_path: Path) -> None:
    for content in ("first", "second"):
        set_aside(tmp_path / "out")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text(content)
    assert (tmp_path / "out.1" / "file").read_text() == "first"


def test_a_run_is_finished_when_nothing_is_missing(tmp_path: Path) -> None:
    config = load_config(write_task(tmp_path, max_steps=2)).config
    out = Path(config.output_dir)
    assert finished_summary(config) is None
    scores = {"val/t/mean@1": 0.5}
    state = RunState(step=2, sampler={}, carried=scores, wall_s=7.0)
    with writing(Checkpoints(out / "checkpoints", config.checkpoint), state):
        pass
    assert finished_summary(config) is None  # neither the record nor hf/
    records = [{"step": 0, "reward/mean": 0.0, "time/step_s": 1.0}, {"step": 2, **scores}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert finished_summary(config) is None  # no hf/
    (out / "hf").mkdir()
    mark_export(out / "hf", 1)
    assert finished_summary(config) is None  # the weights of another step
    mark_export(out / "hf", 2)
    summary = finished_summary(config)
    assert summary is not None
    assert (summary["status"], summary["wall_s"]) == ("finished", 7.0)
    assert read_summary(out) == summary
    (out / "summary.json").write_text("")
    with pytest.raises(DataError, match="remove it, it is made again from the records"):
        finished_summary(config)
    (out / "summary.json").unlink()
    assert finished_summary(config) == summary


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 90, b"{", b"[]", b"{}", b"\xff", b"[" * 100_000],
    ids=["empty", "zeros", "half", "list", "nothing in it", "no text", "nested"],
)
def test_a_summary_that_is_none_is_named_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(DataError, match=r"summary\.json should hold .*; remove it, it is"):
        read_summary(tmp_path)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", "one")
    (tmp_path / ".a.tmp").mkdir()
    with pytest.raises(OSError, match=r"a\.tmp"):
        replace_file(tmp_path / "a", "two")
    (tmp_path / ".a.tmp").rmdir()
    assert (tmp_path / "a").read_text() == "one"
    replace_file(tmp_path / "a", "three")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a": "three"}


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Path]:
    """A working directory of its own."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


def test_workers_get_absolute_paths_and_hub_names_stay(inside: Path) -> None:
    path = write_task(inside)
    written = load_config(
        path,
        ["output_dir=runs/a", "model.path=model", "actor_train.model.path=org/name",
         "reference.model.path=./model", "reference.model.tokenizer=model"],
    ).config  # fmt: skip
    assert isinstance(written, RlvrConfig)
    config = absolute_paths(written)
    assert config.output_dir == str(inside / "runs/a")
    assert config.model.path == str(inside / "model")
    assert config.train_model.path == "org/name"
    assert config.reference_model.path == str(inside / "model")
    assert config.reference_model.tokenizer == str(inside / "model")
    assert written.output_dir == "runs/a"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            OSError(28, "No space left on device", "/runs/a"),
            1,
            "No space left on device: '/runs/a'",
        ),
        (ValueError("one\ntwo"), 1, "ValueError: one two"),
        (DataError("bad row"), 2, "DataError: bad row"),
    ],
)
def test_every_error_is_a_line_and_an_exit_code(
    error: Exception, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, reported(debug=False):
        raise error
    assert ended.value.exit_code == code
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), reported(debug=True):
        raise OSError("broken")
    assert "Traceback" in capsys.readouterr().err


def test_a_finished_folder_is_refused_by_the_settings_that_are_other_ones(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=7)
    config = load_config(path).config
    state = RunState(step=7, sampler={})
    with writing(
        Checkpoints(Path(config.output_dir) / "checkpoints", config.checkpoint), state
    ) as f:
        (f / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for same in ([], ["track.rollouts_every=5", "checkpoint.keep_last=1"]):
        refuse_other_settings(load_config(path, same).config)
    other = load_config(path, ["actor_train.optimizer.lr=0.5", "max_steps=5", "seed=3"]).config
    with pytest.raises(SettingsChangedError) as refused:
        refuse_other_settings(other)
    said = str(refused.value)
    assert not isinstance(refused.value, UserError), "so that the exit code is 1"
    assert "is complete (7 steps), but 3 settings are not what this run asks for" in said
    for line in ("actor_train.optimizer.lr: 0.001 -> 0.5", "seed: 0 -> 3", "max_steps: 7 -> 5"):
        assert f"\n  {line}" in said
    assert "another output_dir" in said
