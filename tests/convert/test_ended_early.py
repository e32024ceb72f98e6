"""Full disks, signals and kills: nothing half done stays, no process, and the reason is told."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from mcore_adapter.convert import commands
from mcore_adapter.convert.storage.output import complete_or_absent
from mcore_adapter.errors import ConversionError
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.ended import Case, run_cases
from tests.convert.test_interruption import CONFIG
from tests.convert.tiny_checkpoints import ALONE, numbered

ENDS = {signal.SIGTERM: -15, signal.SIGHUP: -1, signal.SIGINT: 130}
WORKERS = (1, 2, 3)


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered(tmp_path_factory.mktemp("ended") / "src", CONFIG)


def test_a_full_disk_is_named_whoever_writes(src: Path, tmp_path: Path) -> None:
    cases = [
        Case(src=str(src), dst=str(tmp_path / "dst"), workers=workers, full_after=after)
        for workers in WORKERS
        for after in (0, 20_000)
    ]
    for case, end in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert end.code == 3, case
        assert f"{tmp_path} is full (ENOSPC: No space left on device)" in end.message, case
    assert os.listdir(tmp_path) == []


def test_a_signal_leaves_neither_folder_nor_process(src: Path, tmp_path: Path) -> None:
    cases = [
        Case(src=str(src), dst=str(tmp_path / "dst"), workers=workers, signal=number, at=10)
        for workers in WORKERS
        for number in ENDS
    ]
    for case, end in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert end.code == ENDS[signal.Signals(case.signal)], case
        assert end.alive == 0, case
    assert os.listdir(tmp_path) == []


def test_an_interruption_while_workers_start_leaves_none(src: Path, tmp_path: Path) -> None:
    """It comes when a worker runs that nobody has noted down."""
    cases = [
        Case(src=str(src), dst=str(tmp_path / "dst"), workers=3, signal=number, at=0)
        for number in ENDS
    ]
    for case, end in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert end.code == ENDS[signal.Signals(case.signal)], case
        assert end.alive == 0, case
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["dst", "a[0-9]b", "[", "*", "é 雪", "a.b?"])
def test_what_a_killed_run_left_is_cleared_whatever_its_name(
    name: str, src: Path, tmp_path: Path
) -> None:
    dst = tmp_path / name
    (end,) = run_cases([Case(src=str(src), dst=str(dst), signal=signal.SIGKILL, at=5)], tmp_path)
    assert end.code == -9
    (left,) = os.listdir(tmp_path)
    assert left.startswith(f".{name}.partial-")
    commands.to_mcore(src, dst, ParallelSizes(), ALONE)
    assert os.listdir(tmp_path) == [name]


def test_only_leftovers_are_cleared(src: Path, tmp_path: Path) -> None:
    """Not what another conversion left, nor what a user calls alike, nor what a link points to."""
    others = [".dst.partial-mine", ".dst2.partial-01234567", ".d.partial-01234567"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / ".dst.partial-89abcdef").symlink_to("precious")
    (tmp_path / ".dst.partial-00000000").write_text("a file")
    kept = sorted(os.listdir(tmp_path))
    commands.to_mcore(src, tmp_path / "dst", ParallelSizes(), ALONE)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "dst"])
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_without_locks_it_is_written_and_nothing_is_cleared(src: Path, tmp_path: Path) -> None:
    """A hidden folder may be one that its owner still writes to."""
    (tmp_path / ".dst.partial-01234567").mkdir()
    numbers = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
    for number in numbers:
        case = Case(src=str(src), dst=str(tmp_path / "dst"), no_locks=number)
        (end,) = run_cases([case], tmp_path)
        assert end.code == 0, end
        assert sorted(os.listdir(tmp_path)) == [".dst.partial-01234567", "dst"]
        (tmp_path / "dst").rename(tmp_path.parent / f"dst{number}")


def test_a_folder_that_another_process_has_locked_for_too_long_is_named(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(ConversionError) as caught,
            complete_or_absent(tmp_path / "dst", 1, patience_s=0.2),
        ):
            pytest.fail("it is locked")
    finally:
        os.close(other)
    assert f"{tmp_path} has been locked by another process for 0.2 s" in str(caught.value)
    assert "or write to another folder" in str(caught.value)
    assert os.listdir(tmp_path) == []
    with complete_or_absent(tmp_path / "dst", 1):
        pass
    assert os.listdir(tmp_path) == ["dst"]
