"""Makers of kept rows that are killed, wait for each other, or lose a process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.data import DataConfig
from roll.core.errors import WaitTimeoutError, WorkerError
from roll.data.datasets import load_prompts
from roll.data.store.folder import sole_maker
from roll.data.store.load import RowStore
from tests.tiny import char_tokenizer

ROOT = Path(__file__).parents[3]
MAKE = """
import sys, logging
from pathlib import Path
from roll.config.sections.data import TextDataConfig
from roll.data.examples import load_texts
from roll.data.store.load import RowStore
from tests.tiny import char_tokenizer
logging.basicConfig(level=logging.INFO)
source = {"path": sys.argv[1], "columns": {"messages": None, "completion": "a"}}
data = TextDataConfig.model_validate(
    {"sources": (source,), "rows_per_step": 1, "chat_template": False, "max_tokens": 4096},
    strict=False,
)
store = RowStore(Path(sys.argv[2]), large_bytes=1, processes=int(sys.argv[3]))
loaded = load_texts(data.sources, data, char_tokenizer(), None, store)
print(len(loaded), loaded.fingerprint)
"""


def start(path: Path, kept: Path, processes: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKE, str(path), str(kept), str(processes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows that take seconds to tokenize."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'a': f'{i}+' * 500})}\n" for i in range(1500)))
    return path


def parts_of(kept: Path) -> list[Path]:
    return [*kept.glob("*.part")] if kept.is_dir() else []


def until(condition: object, limit_s: float = 120.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_what_a_killed_maker_has_left_is_not_trusted(rows: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    maker = start(rows, kept)
    until(lambda: any(parts_of(kept)))
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=60)
    assert len(parts_of(kept)) == 1, "the test killed it too late"
    assert not [each for each in kept.iterdir() if each.is_dir() and each.suffix != ".part"]
    out, err = start(rows, kept).communicate(timeout=300)
    assert out.startswith("1500 "), err
    assert "tokenizing" in err
    assert not parts_of(kept)


@pytest.mark.slow
def test_of_two_starts_at_once_one_makes_the_rows(rows: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    makers = [start(rows, kept) for _ in range(2)]
    told = [maker.communicate(timeout=300) for maker in makers]
    assert told[0][0] == told[1][0] != ""
    assert sum("tokenizing" in err for _, err in told) == 1, told


def dying(row: dict[str, Any]) -> None:
    """Kill the process that tokenizes."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_start_with_an_error(rows: Path, tmp_path: Path) -> None:
    source = {"path": str(rows), "fn": "tests.unit.stored_rows.test_makers:dying"}
    data = DataConfig.model_validate({"sources": (source,), "prompts_per_step": 1}, strict=False)
    store = RowStore(tmp_path / "kept", large_bytes=1, processes=2)
    with pytest.raises(WorkerError, match="a process that tokenizes rows has ended"):
        load_prompts(data.sources, data, char_tokenizer(), store=store)
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


def children_of(pid: int) -> list[Path]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}") for child in found]


def tokenizing(pid: int) -> list[Path]:
    """Child processes that run `multiprocessing.spawn`."""
    named = [each for each in children_of(pid) if b"spawn_main" in (each / "cmdline").read_bytes()]
    return named if len(named) == 2 else []


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(rows: Path, tmp_path: Path) -> None:
    maker = start(rows, tmp_path / "kept", processes=2)
    until(lambda: tokenizing(maker.pid))
    children = tokenizing(maker.pid)
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=60)
    until(lambda: not any(each.exists() for each in children))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder whose lock another holds."""
    handle = os.open(tmp_path / "key.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield tmp_path / "key"
    os.close(handle)


def test_a_maker_that_does_not_get_on_is_not_waited_for(held: Path) -> None:
    told = pytest.raises(WaitTimeoutError, match=r"written nothing for 0.5 s.*data.cache")
    with told, sole_maker(held, patience_s=0.5):
        raise AssertionError("it has the lock")


def test_a_maker_that_gets_on_is_waited_for(held: Path) -> None:
    part = held.with_name("key.1.part")
    part.mkdir()
    stopped = threading.Event()

    def grow() -> None:
        with (part / "rows.arrow").open("ab", buffering=0) as file:
            while not stopped.wait(0.1):
                file.write(b"x")

    growing = threading.Thread(target=grow)
    growing.start()
    begun = time.monotonic()
    threading.Timer(3.0, stopped.set).start()
    with pytest.raises(WaitTimeoutError), sole_maker(held, patience_s=1.0):
        raise AssertionError("it has the lock")
    growing.join()
    assert time.monotonic() - begun > 3.5


def test_the_folder_of_another_maker_stays_where_there_are_no_locks(tmp_path: Path) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    part = tmp_path / "key.1.part"
    part.mkdir()
    with sole_maker(tmp_path / "key", flock=no_locks):
        assert part.is_dir()
    with sole_maker(tmp_path / "key"):
        assert not part.exists(), "with the lock, its maker was killed"
