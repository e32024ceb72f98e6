"""A conversion that is killed leaves nothing that looks finished, and the next one clears up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings, shard_bytes, split_files
from mcore_adapter.convert.storage.tensor_file import Spec
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.tiny_checkpoints import ALONE, assert_same, contents, numbered

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "num_experts": 0,
}
SIZES = ParallelSizes(tp=2, pp=2)
# the signal is sent by the process to itself when some tensors are written
JOB = """
import os, signal, sys
from pathlib import Path
from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.parallel_sizes import ParallelSizes

left = 10
# shells that start tests in the background have them ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)

def progress(num_bytes):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), int(sys.argv[4]))

if __name__ == "__main__":
    how = Settings(workers=int(sys.argv[3]), progress=progress)
    commands.to_mcore(Path(sys.argv[1]), Path(sys.argv[2]), ParallelSizes(tp=2, pp=2), how)
"""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return numbered(tmp_path / "src", CONFIG)


def interrupted(src: Path, dst: Path, workers: int, number: int) -> None:
    script = src.parent / "job.py"
    script.write_text(JOB)
    command = [sys.executable, str(script), str(src), str(dst), str(workers), str(number)]
    done = subprocess.run(command, capture_output=True, timeout=600)
    assert done.returncode != 0
    script.unlink()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_conversion_is_absent_and_cleared_by_the_next(workers: int, src: Path) -> None:
    dst = src.parent / "dst"
    interrupted(src, dst, workers, signal.SIGKILL)
    (left,) = src.parent.glob(".dst.partial-*")
    assert list(left.glob("dense-*")), "it was killed too early to show anything"
    assert not (left / "mcore.json").exists()
    assert not dst.exists()
    commands.to_mcore(src, dst, SIZES, ALONE)
    assert sorted(os.listdir(src.parent)) == ["dst", "src"]


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_leaves_nothing(workers: int, src: Path) -> None:
    interrupted(src, src.parent / "dst", workers, signal.SIGINT)
    assert os.listdir(src.parent) == ["src"]


def test_workers_end_when_the_first_process_is_killed(src: Path) -> None:
    interrupted(src, src.parent / "dst", 2, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while running(str(src.parent)):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.1)


def running(folder: str) -> list[int]:
    """Processes that have a file of a folder open or mapped."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            maps = (process / "maps").read_text() if process.name.isdigit() else ""
        except OSError:
            continue
        if folder in maps:
            found.append(int(process.name))
    return found


def test_a_conversion_that_still_runs_is_not_cleared(src: Path) -> None:
    dst = src.parent / "dst"
    seen: list[int] = []

    def progress(num_bytes: int) -> None:
        if not seen:
            seen.append(num_bytes)
            commands.to_mcore(src, src.parent / "other", SIZES, ALONE)
            commands.to_mcore(src, dst, SIZES, ALONE)  # to the same place, and done first

    with pytest.raises(Exception, match="dst exists"):
        commands.to_mcore(src, dst, SIZES, Settings(workers=1, progress=progress))
    assert_same(src.parent / "other", dst)
    assert sorted(os.listdir(src.parent)) == ["dst", "other", "src"]


def test_several_processes_write_what_one_writes(src: Path) -> None:
    commands.to_mcore(src, src.parent / "one", SIZES, ALONE)
    written: list[int] = []
    how = Settings(workers=3, progress=written.append)
    commands.to_mcore(src, src.parent / "three", SIZES, how)
    assert_same(src.parent / "one", src.parent / "three")
    stored = contents(src.parent / "one").values()
    assert sum(written) == sum(tensor.nbytes for tensor in stored)
    commands.to_hf(src.parent / "three", src.parent / "back", Settings(workers=2))
    assert_same(src, src.parent / "back")


def test_hugging_face_files_are_split_at_a_size(src: Path) -> None:
    commands.to_mcore(src, src.parent / "mcore", SIZES, ALONE)
    commands.to_hf(src.parent / "mcore", src.parent / "back", ALONE, max_shard_bytes=20_000)
    files = sorted((src.parent / "back").glob("model-*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 25_000 for file in files)
    assert_same(src, src.parent / "back")
    commands.to_mcore(src.parent / "back", src.parent / "again", SIZES, ALONE)
    assert_same(src.parent / "mcore", src.parent / "again")


@pytest.mark.parametrize("flush", [False, True])
def test_the_disk_is_waited_for_where_asked(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    flushed = []
    fsync = os.fsync

    def watch(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", watch)
    commands.to_mcore(src, tmp_path / "dst", SIZES, Settings(workers=1, flush=flush))
    written = {file.name for file in (tmp_path / "dst").iterdir()}
    assert (written <= set(flushed)) is flush
    assert bool(flushed) is flush


def test_larger_models_come_in_several_files() -> None:
    """Processes that write into one file wait for each other."""
    tensors = {str(i): Spec("BF16", (50_000_000,)) for i in range(30)}
    assert len(split_files(tensors, shard_bytes(tensors), "one")) == 5
    huge = {str(i): Spec("BF16", (500_000_000,)) for i in range(100)}
    assert len(split_files(huge, shard_bytes(huge), "one")) == 20
    small = {str(i): Spec("BF16", (50_000_000,)) for i in range(5)}
    assert list(split_files(small, shard_bytes(small), "one")) == ["one"]
