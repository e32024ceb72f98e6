"""Two runs never write into one folder, and a lock whose owner is gone holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from roll.core.errors import ConfigError, FolderLostError
from roll.output_dir import run_lock
from roll.output_dir.lock_owner import Owner, read_owner
from roll.output_dir.resume import LOCK, set_aside
from roll.output_dir.run_lock import SILENT_S, RunLock
from tests.runs import ROOT, Command, write_task

HOLD = (
    "import sys, time; from pathlib import Path; from roll.output_dir.run_lock import RunLock\n"
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
        owner = read_owner(tmp_path / LOCK)
        assert owner is not None
        assert owner.pid == os.getpid()


def ticks(pid: int) -> int:
    """When a process began, in ticks since the boot: the 22nd field, the second of which is a name
    in parentheses."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def test_a_number_given_out_again_is_another_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        living = replace(Owner.this_process(), pid=other.pid, begun=ticks(other.pid))
        write(tmp_path, living)
        with pytest.raises(ConfigError, match=f"process {other.pid}"), RunLock(tmp_path):
            pass
        write(tmp_path, replace(living, begun=living.begun - 500))
        with RunLock(tmp_path):
            pass
        other.kill()


def test_the_begin_of_an_owner_does_not_depend_on_the_clock() -> None:
    assert Owner.this_process().begun == ticks(os.getpid())


def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    named = "open('/proc/self/comm', 'w').write(') Z 1 (')\n" + HOLD
    with subprocess.Popen(
        [sys.executable, "-c", named, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid}"), RunLock(tmp_path):
            pass
        holder.kill()


def far() -> Owner:
    return replace(Owner.this_process(), host="far", machine="another boot", pid=1)


def test_an_owner_that_cannot_be_looked_up_and_was_silent_for_long_is_gone(tmp_path: Path) -> None:
    write(tmp_path, far(), silent_s=SILENT_S + 1)
    with RunLock(tmp_path):
        pass


def test_an_owner_that_cannot_be_looked_up_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the crash of a container, which begins again at once."""
    write(tmp_path, far())
    begun = time.monotonic()
    with RunLock(tmp_path, silent_s=0.5):
        assert 0.4 < time.monotonic() - begun < 5
        owner = read_owner(tmp_path / LOCK)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert "host far, process 1, since 20" in caplog.text
    assert "Waiting for a sign of life, at most 0.5 s" in caplog.text


def test_an_owner_far_away_that_touches_the_file_is_alive(tmp_path: Path) -> None:
    write(tmp_path, far(), silent_s=SILENT_S / 2)
    touch = threading.Timer(0.3, os.utime, [tmp_path / LOCK])
    touch.start()
    with pytest.raises(ConfigError, match=r"host far, process 1.*just given a sign of life"):
        RunLock(tmp_path, silent_s=SILENT_S).take()
    touch.join()
    owner = read_owner(tmp_path / LOCK)
    assert owner is not None
    assert owner.host == "far"


def test_a_stamp_of_a_wrong_clock_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    write(tmp_path, far(), silent_s=-3600)
    with RunLock(tmp_path, silent_s=0.2):
        pass


def test_an_owner_that_was_silent_and_is_replaced_ends(tmp_path: Path) -> None:
    def be_replaced() -> None:
        lost = threading.Event()
        with RunLock(tmp_path, beat_s=0.01, on_loss=lost.set):
            write(tmp_path, far(), silent_s=-5)
            touched = (tmp_path / LOCK).stat().st_mtime_ns
            assert lost.wait(10)
            assert (tmp_path / LOCK).stat().st_mtime_ns == touched, "it is the other's to touch"

    with pytest.raises(FolderLostError, match=f"{tmp_path} is another's: host far, process 1"):
        be_replaced()
    assert read_owner(tmp_path / LOCK) is not None, "and the other's to remove"


def test_a_run_that_lost_its_folder_is_interrupted_as_by_ctrl_c(tmp_path: Path) -> None:
    def wait_for_something() -> None:
        with RunLock(tmp_path, beat_s=0.01):
            write(tmp_path, far())
            time.sleep(30)

    with pytest.raises(FolderLostError):
        wait_for_something()


def test_a_lock_that_is_gone_after_a_long_silence_was_anothers(tmp_path: Path) -> None:
    def be_silent() -> None:
        lost = threading.Event()
        with RunLock(tmp_path, beat_s=0.2, silent_s=0.1, on_loss=lost.set) as lock:
            lock.path.unlink()
            assert lost.wait(10)

    with pytest.raises(FolderLostError, match=r"run\.lock is gone after a silence"):
        be_silent()


def test_a_lock_that_somebody_removes_ends_no_run_that_is_awake(tmp_path: Path) -> None:
    lost = threading.Event()
    with RunLock(tmp_path, beat_s=0.01, silent_s=0.5, on_loss=lost.set) as lock:
        lock.path.unlink()
        assert not lost.wait(1.5)
        assert read_owner(lock.path) is not None, "so that no other run begins in the folder"


def test_a_folder_that_somebody_removes_ends_no_run_that_is_awake(tmp_path: Path) -> None:
    """The run itself reports it, or makes the folder anew; then it has a lock again."""
    lost, out = threading.Event(), tmp_path / "out"
    with RunLock(out, beat_s=0.01, silent_s=0.5, on_loss=lost.set) as lock:
        shutil.rmtree(out)
        assert not lost.wait(1.5)
        out.mkdir()
        deadline = time.monotonic() + 60
        while read_owner(lock.path) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_owner(lock.path) is not None


def test_runs_that_begin_and_end_together_have_one_folder_each_in_turn(tmp_path: Path) -> None:
    """As with two schedulers that start the same job: one holds it, the other is refused."""
    out, end = tmp_path / "out", time.monotonic() + 2
    inside = threading.Lock()

    def begin(number: int) -> int:
        times = 0
        while time.monotonic() < end:
            try:
                with RunLock(out) as lock:
                    if number == 0:
                        (out / "file").touch()
                        lock.begin_anew()
                    assert inside.acquire(blocking=False), "two hold the folder"
                    times += 1
                    time.sleep(0.001)
                    inside.release()
            except ConfigError as error:
                assert "a run is in" in str(error)  # noqa: PT017 - any other one is a fault
        return times

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(begin, range(3))) > 0


def test_the_owner_touches_the_file(tmp_path: Path) -> None:
    with RunLock(tmp_path, beat_s=0.01) as lock:
        os.utime(lock.path, (0, 0))
        deadline = time.monotonic() + 60
        while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0


@pytest.mark.parametrize("content", ["", "{", '{"host": "x"}', "[]", "\x80"])
def test_a_torn_lock_is_void(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content, encoding="latin-1")
    with RunLock(tmp_path):
        pass


def test_a_lock_that_cannot_be_read_is_not_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, **_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    lock = RunLock(tmp_path)
    monkeypatch.setattr(Path, "read_text", broken)
    with pytest.raises(ConfigError, match=r"run\.lock cannot be read \(Input/output error\)"):
        lock.take()


def test_a_process_that_may_not_be_looked_up_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a /proc that hides the processes of other users."""
    owner = replace(Owner.this_process(), pid=4_000_000)

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    assert not owner.runs_here()
    monkeypatch.setattr(os, "kill", refuse)
    assert owner.runs_here()


def test_a_folder_set_aside_loses_the_lock_and_the_new_one_has_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    with RunLock(out) as lock:
        lock.begin_anew()
        assert [path.name for path in (tmp_path / "out.1").iterdir()] == ["metrics.jsonl"]
        assert (out / LOCK).exists()
    assert not out.exists()


def test_a_run_that_takes_the_folder_just_after_it_was_set_aside_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock found in the new folder is the other run's: this one is refused, it lost nothing."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    with contextlib.ExitStack() as others:

        def set_aside_and_lose_the_race(folder: Path) -> None:
            set_aside(folder)
            others.enter_context(RunLock(out))

        monkeypatch.setattr(run_lock, "set_aside", set_aside_and_lose_the_race)
        with pytest.raises(ConfigError, match="a run is in"), RunLock(out) as lock:
            lock.begin_anew()
        assert (tmp_path / "out.1" / "metrics.jsonl").exists()
        assert read_owner(out / LOCK) is not None


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
