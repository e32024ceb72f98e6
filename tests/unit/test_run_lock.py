"""Two runs never write into one folder, and a lock whose owner is gone holds nobody up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from roll.core.errors import ConfigError
from roll.pipeline.folder import LOCK, set_aside
from roll.pipeline.run_lock import SILENT_S, Owner, RunLock, read_owner
from tests.runs import ROOT, Command, write_task

HOLD = (
    "import sys, time; from pathlib import Path; from roll.pipeline.run_lock import RunLock\n"
    "with RunLock(Path(sys.argv[1])): print('holds', flush=True); time.sleep(600)"
)


def write(folder: Path, owner: Owner, *, silent_s: float = 0.0) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    touched = time.time() - silent_s
    os.utime(path, (touched, touched))


def test_a_second_run_is_refused_by_host_process_and_time_until_the_first_ends(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with RunLock(out):
        own = Owner.this_process()
        with pytest.raises(ConfigError) as refused, RunLock(out):
            pass
        said = str(refused.value)
        assert str(out) in said
        assert own.host in said
        assert f"process {own.pid}, since 20" in said
        assert read_owner(out / LOCK) is not None, "the refused one has left the lock alone"
    assert not out.exists(), "nothing was written, so nothing is left"
    with RunLock(out):
        (out / "file").touch()
    assert [path.name for path in out.iterdir()] == ["file"]


@pytest.mark.slow
def test_the_lock_of_a_killed_run_is_void(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid}"), RunLock(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        assert read_owner(tmp_path / LOCK).pid == os.getpid()  # type: ignore[union-attr]


def test_a_number_given_out_again_is_another_process(tmp_path: Path) -> None:
    other = psutil.Process().parent()
    living = replace(Owner.this_process(), pid=other.pid, begun=other.create_time())
    write(tmp_path, living)
    with pytest.raises(ConfigError, match=f"process {other.pid}"), RunLock(tmp_path):
        pass
    write(tmp_path, replace(living, begun=living.begun - 5))
    with RunLock(tmp_path):
        pass


def test_an_owner_on_another_machine_lives_while_it_touches_the_file(tmp_path: Path) -> None:
    far = replace(Owner.this_process(), host="far", machine="another boot", pid=1)
    write(tmp_path, far, silent_s=SILENT_S / 2)
    with pytest.raises(ConfigError, match=r"host far, process 1.*sign of life 30 s ago"):
        RunLock(tmp_path).take()
    write(tmp_path, far, silent_s=SILENT_S + 1)
    with RunLock(tmp_path):
        pass


def test_the_owner_touches_the_file(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_s=0.01) as lock:
        os.utime(lock.path, (0, 0))
        deadline = time.monotonic() + 10
        while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0


@pytest.mark.parametrize("content", ["", "{", '{"host": "x"}', "[]", "\x80"])
def test_a_torn_lock_is_void(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content, encoding="latin-1")
    with RunLock(tmp_path):
        pass


def test_a_folder_set_aside_loses_the_lock_and_the_new_one_has_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    with RunLock(out) as lock:
        set_aside(out)
        lock.take()
        assert [path.name for path in (tmp_path / "out.1").iterdir()] == ["metrics.jsonl"]
        assert (out / LOCK).exists()
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_command_line_refuses_a_folder_in_use_before_it_touches_anything(
    tmp_path: Path, resume: str
) -> None:
    path = write_task(tmp_path / "task")
    out = tmp_path / "task" / "out"
    with RunLock(out):
        unfinished = out / "checkpoints" / ".writing_step_000002"
        unfinished.mkdir(parents=True)
        command = Command("run", str(path), f"resume={resume}")
        code, output = command.wait()
        assert code == 2
        assert re.search(rf"ConfigError: output_dir: a run is in {out} already: host", output)
        assert f"process {os.getpid()}" in output
        assert "starting Ray" not in output
        assert unfinished.is_dir()
    assert not (tmp_path / "task" / "out.1").exists()
