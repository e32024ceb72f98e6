"""What carries a mark is killed, whatever state it is in; what does not is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from roll.distributed.on_ray.environment import FOR_ALL_ACTORS, RAY_VARIABLES, RUN_TOKEN
from roll.distributed.processes import reaper
from roll.distributed.processes.reaper import end_marked, started

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(600)"]

OWNER = (
    "import sys, time; from roll.distributed.processes.reaper import start_reaper\n"
    "start_reaper(sys.argv[1]); print(flush=True); time.sleep(600)"
)
TRACKED_OWNER = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
from roll.distributed.processes.reaper import start_reaper
start_reaper(sys.argv[1], tracker=True)
memory = SharedMemory(create=True, size=1)
if not (child := os.fork()):
    memory = SharedMemory(create=True, size=1)
    released = SharedMemory(create=True, size=1)
    released.unlink()
    os.write(1, memory.name.encode() + b"\\n")
    time.sleep(600)
os.write(1, memory.name.encode() + b"\\n")
time.sleep(600)
"""
"""It and its child write their lines in one piece each, as `print` may not."""
ROOT = Path(__file__).parents[3]


def sleeper(**environ: str) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(SLEEP, env=environ, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    return started


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    started = sleeper(MARK="another")
    yield started
    started.kill()
    started.wait()


def test_stopped_and_running_processes_with_the_mark_end_and_no_others(
    bystander: subprocess.Popen[bytes],
) -> None:
    token = uuid.uuid4().hex
    marked = [sleeper(MARK=token) for _ in range(2)]
    os.kill(marked[0].pid, signal.SIGSTOP)
    assert end_marked(f"MARK={token}", timeout_s=60)
    assert [each.wait(timeout=1) for each in marked] == [-signal.SIGKILL] * 2
    assert bystander.poll() is None


@pytest.mark.parametrize("variables", [FOR_ALL_ACTORS, RAY_VARIABLES], ids=["actor", "Ray"])
@pytest.mark.parametrize("package", ["setproctitle", "ray._raylet"])
def test_a_process_that_gives_itself_a_title_keeps_its_mark(
    variables: dict[str, str], package: str
) -> None:
    """The mark is the first variable, as it may be in processes that Ray starts, and the title is
    longer than the command."""
    token = uuid.uuid4().hex
    code = f"from {package} import setproctitle; setproctitle('t' * 500); {SLEEP[-1]}"
    titled = subprocess.Popen(
        [sys.executable, "-c", code],
        env={RUN_TOKEN: token} | variables | {"FILL": "x" * 1000},
        stdout=subprocess.PIPE,
    )
    assert titled.stdout is not None
    assert titled.stdout.readline()
    title = Path(f"/proc/{titled.pid}/cmdline").read_text().rstrip("\0")
    assert set(title) == {"t"}
    try:
        assert end_marked(f"{RUN_TOKEN}={token}", timeout_s=60)
        assert titled.wait(timeout=5) == -signal.SIGKILL
    finally:
        titled.kill()


def test_a_killed_process_that_shows_no_mark_any_more_is_waited_for(
    bystander: subprocess.Popen[bytes],
) -> None:
    killed = {(bystander.pid, str(started(bystander.pid)))}
    assert not end_marked(f"MARK={uuid.uuid4().hex}", 1, killed)
    bystander.kill()
    assert end_marked(f"MARK={uuid.uuid4().hex}", 60, killed)
    assert started(bystander.pid) is None


def test_a_process_with_the_id_of_an_ended_one_is_another(
    bystander: subprocess.Popen[bytes],
) -> None:
    assert end_marked(f"MARK={uuid.uuid4().hex}", 60, {(bystander.pid, "1")})


SHARING = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 20)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name.lstrip("/"), "sem." + lock._semlock.name.lstrip("/"), flush=True)
time.sleep(600)
"""


def sharing(token: str) -> tuple[subprocess.Popen[bytes], list[Path]]:
    """A process with shared memory and a semaphore, and the files of both."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHARING], env={"MARK": token}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    files = [Path("/dev/shm", name) for name in process.stdout.readline().decode().split()]
    assert [file.exists() for file in files] == [True, True]
    return process, files


def test_killed_processes_leave_no_shared_memory() -> None:
    token = uuid.uuid4().hex
    process, files = sharing(token)
    others = [SharedMemory(create=True, size=1) for _ in range(2)]
    try:
        assert end_marked(f"MARK={token}", timeout_s=60)
        assert process.wait(timeout=1) == -signal.SIGKILL
        assert [file.exists() for file in files] == [False, False]
        assert all(Path("/dev/shm", each.name).exists() for each in others)
    finally:
        for each in others:
            each.close()
            each.unlink()


def test_a_tracker_that_does_not_end_is_killed() -> None:
    token = uuid.uuid4().hex
    process, files = sharing(token)
    [tracker] = (child.pid for child in psutil.Process(process.pid).children())
    os.kill(tracker, signal.SIGSTOP)
    try:
        assert end_marked(f"MARK={token}", timeout_s=60, tracker_s=0.2)
        assert started(tracker) is None
        assert process.wait(timeout=1) == -signal.SIGKILL
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_a_worker_s_tracker_lives_on_when_its_children_and_its_group_are_killed() -> None:
    command = [sys.executable, "-c", TRACKED_OWNER, f"MARK={uuid.uuid4().hex}"]
    owner = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    files = [Path("/dev/shm", owner.stdout.readline().decode().strip()) for _ in range(2)]
    assert [file.is_file() for file in files] == [True, True]
    for child in psutil.Process(owner.pid).children(recursive=True):
        child.kill()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait(timeout=10)
    assert gone_within(60, files)
    assert owner.stderr.read() == b""


def test_names_are_read_when_the_worker_ends_before_its_reaper_looks() -> None:
    file = Path("/dev/shm", f"roll-{uuid.uuid4().hex}")
    file.write_bytes(b"x")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names, told = os.pipe()
    os.write(told, f"REGISTER:/{file.name}:shared_memory\n".encode())
    os.close(told)
    arguments = [str(ended.pid), f"MARK={uuid.uuid4().hex}", str(names)]
    command = [sys.executable, "-I", "-S", reaper.__file__, *arguments]
    try:
        subprocess.run(command, env={}, pass_fds=[names], check=True, timeout=60)
        assert gone_within(60, [file])
    finally:
        os.close(names)
        file.unlink(missing_ok=True)


def gone_within(limit_s: float, files: list[Path]) -> bool:
    deadline = time.monotonic() + limit_s
    while any(file.exists() for file in files):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_nothing_to_end_is_the_end_too() -> None:
    assert end_marked(f"MARK={uuid.uuid4().hex}", timeout_s=60)


def test_a_time_that_is_over_is_said() -> None:
    assert not end_marked(f"MARK={uuid.uuid4().hex}", timeout_s=0)


def ended_owner(token: str) -> None:
    """Start a process with a reaper and kill it."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, token], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    owner.kill()
    owner.wait()


def test_a_reaper_finds_a_process_that_shows_its_mark_late() -> None:
    token = uuid.uuid4().hex
    ended_owner(f"MARK={token}")
    time.sleep(0.7)
    late = sleeper(MARK=token)
    assert late.wait(timeout=20) == -signal.SIGKILL


def test_a_tracker_that_shows_its_mark_late_is_left_to_end() -> None:
    token = uuid.uuid4().hex
    ended_owner(f"MARK={token}")
    time.sleep(0.7)
    code = "import time; time.sleep(3)  # as if it were a resource_tracker"
    late = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env={"MARK": token})
    assert late.wait(timeout=20) == 0
