"""Copies of checkpoints at URLs: complete or not taken for complete, tried again, never a reason to
end a run. The file systems are those of fsspec, and one that fails as often as it is told."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from roll.config import load_config
from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import CheckpointError, ConfigError
from roll.output_dir.checkpoints import Checkpoints, RunState
from roll.output_dir.upload import MAX_HELD, Uploads, check_urls, fetched
from roll.pipeline.outputs.saves import Saves
from tests.runs import write_task
from tests.unit.runtime.written_checkpoints import writing


class Flaky(LocalFileSystem):
    """Local files; `failures` further copies fail."""

    protocol = "flaky"
    failures: ClassVar[int] = 0
    copied: ClassVar[list[str]] = []

    def put_file(self, local: str, path: str, **options: Any) -> None:
        if Flaky.failures:
            Flaky.failures -= 1
            raise TimeoutError("the service is busy")
        Flaky.copied.append(path)
        super().put_file(local, path, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


def write(checkpoints: Checkpoints, step: int) -> Path:
    with writing(checkpoints, RunState(step=step, sampler={})) as folder:
        (folder / "actor_train").mkdir()
        (folder / "actor_train/shard").write_bytes(bytes(range(200)) * step)
    return checkpoints.folder / f"step_{step:06d}"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_copy_ends_with_its_state_and_comes_back_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(Checkpoints(tmp_path / "all", CheckpointConfig()), 1)
    Flaky.failures, Flaky.copied = 1, []
    url = f"flaky://{tmp_path}/there"
    uploads = Uploads(url, limit_s=60, pauses_s=(0.01,))
    uploads.add(folder)
    uploads.wait()
    assert "TimeoutError: the service is busy; trying again in 0.01 s" in caplog.text
    assert f"{url}/step_000001/actor_train/shard" in caplog.text
    assert Flaky.copied[-1].endswith("step_000001/state.json")
    assert contents(tmp_path / "there/step_000001") == contents(folder)
    back = fetched(f"file://{tmp_path}/there/step_000001", tmp_path / "other")
    assert back.is_relative_to(tmp_path / "other/fetched")
    assert contents(back) == contents(folder)
    (tmp_path / "there/step_000001/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint \(state\.json is missing"):
        fetched(f"file://{tmp_path}/there/step_000001", tmp_path / "third")


def test_a_copy_that_fails_is_named_and_again_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(Checkpoints(tmp_path / "all", CheckpointConfig()), 1)
    Flaky.failures = 2
    url = f"flaky://{tmp_path}/there"
    uploads = Uploads(url, limit_s=60, pauses_s=(0.01,))
    uploads.add(folder)
    uploads.wait()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert str(folder) in told[-2]
    assert f"{url}/step_000001/actor_train/shard: TimeoutError" in told[-2]
    assert told[-1].startswith(f"step_000001 is not at {url}: ")
    assert not (tmp_path / "there/step_000001/state.json").exists()


def test_checkpoints_stay_until_they_are_copied_and_a_later_session_makes_up_for_it(
    tmp_path: Path,
) -> None:
    config = CheckpointConfig(keep_last=1, upload="memory://test_upload/run")
    checkpoints = Checkpoints(tmp_path / "all", config)
    write(checkpoints, 1)
    there = fsspec.filesystem("memory")
    with Saves(checkpoints, limit_s=60):
        pass
    assert there.exists("/test_upload/run/step_000001/state.json")
    checkpoints.held = lambda: frozenset({checkpoints.folder / "step_000001"})
    write(checkpoints, 2)
    assert [step for step, _ in checkpoints.complete()] == [1, 2]


def test_a_later_session_copies_all_that_were_not_copied_and_no_other(tmp_path: Path) -> None:
    url = f"flaky://{tmp_path}/there"
    checkpoints = Checkpoints(tmp_path / "all", CheckpointConfig(keep_last=3, upload=url))
    folders = [write(checkpoints, step) for step in (1, 2, 3)]
    uploads = Uploads(url, limit_s=60)
    uploads.add(folders[1])
    uploads.wait()
    Flaky.copied = []
    with Saves(checkpoints, limit_s=60):
        pass
    states = [path for path in Flaky.copied if path.endswith("state.json")]
    assert [Path(path).parent.name for path in states] == ["step_000001", "step_000003"]
    (tmp_path / "there/step_000002/state.json").write_text("{}")  # of a run that went back
    with Saves(checkpoints, limit_s=60):
        pass
    assert contents(tmp_path / "there/step_000002") == contents(folders[1])


class Stuck(LocalFileSystem):
    """Local files; a copy waits until it is let go."""

    protocol = "stuck"
    let_go: ClassVar[threading.Event] = threading.Event()

    def put_file(self, local: str, path: str, **options: Any) -> None:
        assert Stuck.let_go.wait(30)
        super().put_file(local, path, **options)


fsspec.register_implementation("stuck", Stuck, clobber=True)


def test_a_copy_without_progress_is_told_and_holds_few_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"stuck://{tmp_path}/there"
    config = CheckpointConfig(keep_last=MAX_HELD + 2, upload=url)
    checkpoints = Checkpoints(tmp_path / "all", config)
    folders = [write(checkpoints, step) for step in range(1, MAX_HELD + 3)]
    saves = Saves(checkpoints, limit_s=1.0)
    uploads = saves._uploads
    assert uploads is not None
    for folder in folders[:-1]:
        uploads.add(folder)
    assert uploads.held == {folders[0], *folders[2:-1]}
    saves.check()
    assert "no progress" not in caplog.text
    time.sleep(1.2)
    saves.check()
    saves.check()
    assert caplog.text.count(f"copy of checkpoints to {url} has made no progress for") == 1
    Stuck.let_go.set()
    uploads.add(folders[-1])
    uploads.wait()
    there = {path.name for path in (tmp_path / "there").iterdir()}
    assert folders[1].name not in there
    assert folders[-1].name in there
    given_up = f"it was given up, as {MAX_HELD - 1} later ones waited for the one under way"
    assert f"step_000002 is not at {url}: {given_up}" in caplog.text


def test_another_checkpoint_at_the_same_url_is_copied_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path / "all", CheckpointConfig())
    url, there = f"file://{tmp_path}/there", tmp_path / "there"
    write(checkpoints, 1).rename(there)
    first = contents(fetched(url, tmp_path / "run"))
    shutil.rmtree(there)
    assert contents(fetched(url, tmp_path / "run")) == first
    assert "cannot be read (FileNotFoundError" in caplog.text
    write(checkpoints, 2).rename(there)
    second = contents(fetched(url, tmp_path / "run"))
    assert second == contents(there) != first
    before = len(caplog.records)
    assert contents(fetched(url, tmp_path / "run")) == second
    assert len(caplog.records) == before


def test_a_scheme_that_fsspec_does_not_know_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    check_urls(load_config(path, ["checkpoint.upload=file:///anywhere"]).config)
    for key in ("checkpoint.upload", "resume"):
        with pytest.raises(ConfigError, match=rf"^{key}: fsspec cannot open s4://bucket"):
            check_urls(load_config(path, [f"{key}=s4://bucket"]).config)
    with pytest.raises(ValueError, match="is no URL; write"):
        CheckpointConfig(upload="/anywhere")
