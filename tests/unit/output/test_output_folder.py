"""The output folder: writable or a clear error; finished or what is missing; paths for workers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from roll.cli import reported
from roll.commands.checks.output_folder import check_output_folder, check_resume
from roll.commands.preflight import inspect
from roll.config import RlvrConfig, load_config
from roll.config.loading.written import run_file_text
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
from tests.runs import ROOT, write_task
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


def test_a_run_file_of_the_users_is_not_overwritten_by_its_run(tmp_path: Path) -> None:
    own = write_task(tmp_path).rename(tmp_path / "config.yaml")
    based = tmp_path / "based.yaml"
    based.write_text("defaults: [config.yaml]\nseed: 3\n")
    for path in (own, based):
        with pytest.raises(ConfigError, match=r"output_dir: .*config\.yaml, which is the run file"):
            check_output_folder(load_config(path, [f"output_dir={tmp_path}"]))
        check_output_folder(load_config(path))
    found = inspect(load_config(own, [f"output_dir={tmp_path}"]))
    assert any("what you wrote there would be lost" in str(one.error) for one in found)


def test_the_config_that_a_run_has_written_is_its_run_file_the_next_time(tmp_path: Path) -> None:
    first = load_config(write_task(tmp_path)).config
    path = Path(first.output_dir) / "config.yaml"
    path.parent.mkdir()
    path.write_text(run_file_text(first))
    check_output_folder(load_config(path))  # killed before its first step
    path.write_text(write_task(tmp_path).read_text())
    (path.parent / "metrics.jsonl").touch()
    check_output_folder(load_config(path))


def test_never_moves_nothing_that_is_no_earlier_run_or_is_still_needed(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    out = tmp_path / "out"

    def check(*overrides: str, file: Path = path) -> None:
        check_output_folder(load_config(file, ["resume=never", *overrides]))

    check()  # there is no such folder
    out.mkdir()
    check()  # an empty one
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"resume: never .*/out, .*no earlier run.* notes\.txt"):
        check()
    (out / "metrics.jsonl").touch()
    (out / "config.yaml").write_text(path.read_text())
    check()
    check(file=out / "config.yaml")
    with pytest.raises(ConfigError, match=r"the run file .*/out/own\.yaml"):
        check(file=path.rename(out / "own.yaml"))
    (out / "own.yaml").rename(path)
    (tmp_path / "model").rename(out / "hf")
    with pytest.raises(ConfigError, match=r"which holds model\.path: .*/out/hf"):
        check(f"model.path={out}/hf")
    (out / "hf").rename(tmp_path / "model")
    (out / "b").mkdir()
    (out / "b" / "run.lock").touch()
    with pytest.raises(ConfigError, match=r"in which .*/out/b is another run"):
        check()


def test_a_resume_that_is_no_checkpoint_is_refused_before_the_run(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    for good in ("auto", "never", "s3://bucket/run/step_000002"):
        check_resume(load_config(path, [f"resume={good}"]).config)
    config = load_config(path, [f"resume={tmp_path}/step_000002"])
    with pytest.raises(ConfigError, match=r"resume: .*no complete checkpoint \(there is no such"):
        check_resume(config.config)
    assert any("no complete checkpoint" in str(finding.error) for finding in inspect(config))


def test_never_sets_aside_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "disk" / "out" / "file").write_text("first")
    (tmp_path / "link").symlink_to("disk/out")
    set_aside(tmp_path / "link")
    assert (tmp_path / "disk" / "out.1" / "file").read_text() == "first"
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "link").iterdir()) == []


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


FULL_DISK = """
import pathlib, resource, sys
from roll.core.errors import ConfigError
from roll.output_dir.resume import check_writable
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    check_writable(pathlib.Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


def test_a_disk_with_room_for_a_folder_alone_is_told_before_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    told = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert told.startswith(f"output_dir: {folder} cannot be written (")
    assert list(tmp_path.iterdir()) == []
