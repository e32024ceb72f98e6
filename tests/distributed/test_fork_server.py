"""The fork server as Ray uses it: a command in place of `python`, one process for each call."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll.commands.preloads import ENGINES, ENGINES_APART, LEARNERS, SHARED
from roll.distributed.on_ray.environment import SPIN_BRIEFLY, WAITING, WORKER_TOKEN
from roll.distributed.processes import fork_client, reaper
from roll.distributed.processes.fork_server import ONLY_AT_LOAD, ForkServer

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
TELL = """
import json, os, sys, threading
import numpy
found = {
    "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path[:2],
    "had": "decimal" in sys.modules, "drawn": float(numpy.random.random()), "pid": os.getpid(),
    "group": os.getpgid(0), "name": __name__,
}
print(json.dumps(found))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
CACHED = """
import ctypes
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]
library.mallinfo2.restype = Info
blocks = [library.malloc(size) for size in range(200, 1000, 16) for _ in range(4)]
before = library.mallinfo2().uordblks
for block in blocks:
    library.free(block)
print(before - library.mallinfo2().uordblks)
"""
"""Prints how many bytes of 200 freed blocks, of 120,000 bytes, the allocator counts as free."""
WAIT = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["decimal", "numpy"]) as server:
        yield server


def started(
    server: ForkServer, folder: Path, code: str, *, command: str | None = None, **env: str
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.Popen(
        f"exec {command or server.python} -s {script} one 'two three'",
        shell=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def lives(pid: int) -> bool:
    return reaper.started(pid) is not None


def waiting(server: ForkServer, folder: Path, **env: str) -> tuple[subprocess.Popen[str], int]:
    """A fork that sleeps, and its process number."""
    client = started(server, folder, WAIT, **env)
    assert client.stdout is not None
    return client, int(client.stdout.readline())


def test_threads_of_a_fork_keep_no_freed_blocks(server: ForkServer, tmp_path: Path) -> None:
    out, err = started(server, tmp_path, CACHED).communicate(timeout=LIMIT_S)
    assert int(out) > 110_000, err


def test_a_fork_is_the_python_that_was_asked_for(server: ForkServer, tmp_path: Path) -> None:
    both = [started(server, tmp_path, TELL, PYTHONPATH="/a:/b", MINE="1") for _ in range(2)]
    told = []
    for client in both:
        out, err = client.communicate(timeout=LIMIT_S)
        assert client.returncode == 7
        assert err == "to stderr\n"
        told.append(json.loads(out))
    for found in told:
        assert found["argv"] == [str(tmp_path / "script.py"), "one", "two three"]
        assert found["cwd"] == str(tmp_path)
        assert found["env"]["MINE"] == "1"
        assert "HOME" not in found["env"], "the server's own environment"
        assert found["path"] == [str(tmp_path), "/a"]
        assert found["name"] == "__main__"
        assert found["had"], "nothing was imported before"
        assert found["group"] == found["pid"], "Ray ends what is left of a worker's group"
    assert told[0]["drawn"] != told[1]["drawn"]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fork_ends_with_its_client(server: ForkServer, tmp_path: Path, stopped: bool) -> None:
    client, pid = waiting(server, tmp_path)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    client.kill()
    client.wait(LIMIT_S)
    assert eventually(lambda: not lives(pid))


def test_a_client_ends_like_its_fork(server: ForkServer, tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        client, pid = waiting(server, tmp_path)
        os.kill(pid, number)
        assert client.wait(LIMIT_S) == -number


def test_the_mark_of_a_worker_is_found_on_its_fork(server: ForkServer, tmp_path: Path) -> None:
    client, pid = waiting(server, tmp_path, **{WORKER_TOKEN: "some-token"})
    os.kill(pid, signal.SIGSTOP)
    client.send_signal(signal.SIGSTOP)
    assert reaper.end_marked(f"{WORKER_TOKEN}=some-token", LIMIT_S)
    assert not lives(pid)


def test_an_ended_fork_disturbs_no_other(server: ForkServer, tmp_path: Path) -> None:
    first, _ = waiting(server, tmp_path)
    second, pid = waiting(server, tmp_path)
    first.kill()
    third = started(server, tmp_path, "print(5)")
    assert third.communicate(timeout=LIMIT_S) == ("5\n", "")
    assert lives(pid)
    second.kill()


def test_clients_that_are_killed_as_they_connect_disturb_nobody(
    server: ForkServer, tmp_path: Path
) -> None:
    name = server.python.split()[-1]
    with (
        socket.socket(socket.AF_UNIX) as silent,
        socket.socket(socket.AF_UNIX) as torn,
    ):
        silent.connect(f"\0{name}")
        torn.connect(f"\0{name}")
        torn.sendall(fork_client.LENGTH.pack(1000) + b"{")
    client = started(server, tmp_path, "import sys; print('decimal' in sys.modules)")
    assert client.communicate(timeout=LIMIT_S) == ("True\n", "")


def test_a_server_with_too_many_open_files_goes_on_when_it_has_less(
    server: ForkServer, tmp_path: Path
) -> None:
    first, kept = waiting(server, tmp_path)
    pid = server._process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    client = started(server, tmp_path, "import sys; print('decimal' in sys.modules)")
    time.sleep(1.0)
    assert lives(pid)
    assert lives(kept)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert client.communicate(timeout=LIMIT_S) == ("True\n", "")
    first.kill()


def test_without_a_server_that_lives_a_client_is_plain_python(tmp_path: Path) -> None:
    """Also one that had connected before the server ended."""
    with ForkServer(["decimal"]) as server:
        os.kill(server._process.pid, signal.SIGSTOP)
        client = started(server, tmp_path, "import sys; print('decimal' in sys.modules)")
        assert client.stdout is not None
        name = server.python.split()[-1]
        assert eventually(lambda: Path("/proc/net/unix").read_text().count(name) >= 2)
    assert client.communicate(timeout=LIMIT_S) == ("False\n", "")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}])
@pytest.mark.parametrize("overlapping", [False, True])
def test_openmp_finds_its_variables_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], overlapping: bool
) -> None:
    """A fork has the library of the server, which does not read them again."""
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with ForkServer(["decimal"], overlapping=overlapping) as server:
        path = Path(f"/proc/{server._process.pid}/environ")
        assert eventually(lambda: b"OPENBLAS_NUM_THREADS" in path.read_bytes())
        found = dict(pair.split("=", 1) for pair in path.read_text().split("\0") if pair)
    assert {name: found[name] for name in WAITING if name in found} == (
        own or (SPIN_BRIEFLY if overlapping else {})
    )


def test_without_a_server_it_is_plain_python() -> None:
    command = [sys.executable, "-I", "-S", fork_client.__file__, "no such name"]
    done = subprocess.run([*command, "-c", "print(5)"], capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


def test_the_server_ends_with_a_driver_that_is_killed() -> None:
    code = (
        "from roll.distributed.processes.fork_server import ForkServer\n"
        "import os, signal\n"
        "server = ForkServer(['decimal'])\n"
        "print(server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL
    assert eventually(lambda: not lives(int(done.stdout)))


def test_an_engines_modules_are_in_forks_for_engines_alone(tmp_path: Path) -> None:
    code = "import sys; print('decimal' in sys.modules, 'colorsys' in sys.modules)"
    with ForkServer(["decimal"], ["colorsys"]) as server:
        assert started(server, tmp_path, code).communicate(timeout=LIMIT_S)[0] == "True False\n"
        engine = started(server, tmp_path, code, command=server.engine_python)
        assert engine.communicate(timeout=LIMIT_S)[0] == "True True\n"
        assert isinstance(server.engine_python, str)
        name = server.engine_python.split()[-1]
        server.close()
        assert eventually(lambda: name not in Path("/proc/net/unix").read_text())
    with ForkServer(["decimal"]) as server:
        assert server.engine_python is None


@pytest.mark.parametrize("kinds", [["fsdp2", "hf"], ["deepspeed"], ["megatron"], ["vllm"]], ids=str)
def test_what_is_imported_starts_no_thread_and_not_ray(kinds: list[str]) -> None:
    apart = LEARNERS | ENGINES_APART
    modules = [*SHARED, *ENGINES.values(), *(apart[kind] for kind in kinds)]
    code = (
        "import importlib, os, sys\n"
        "sys.modules.setdefault('triton', None)\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert 'ray' not in sys.modules\n"
        "threads = os.listdir('/proc/self/task')\n"
        "assert len(threads) == 1, threads\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ONLY_AT_LOAD | os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
