"""A worker that is a fork has its own children forked, although it has threads by then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.distributed.on_ray.environment import WORKER_TOKEN
from roll.distributed.processes.child_forks import FORKS_CHILDREN, forked_children
from roll.distributed.processes.fork_server import ForkServer
from roll.distributed.processes.reaper import end_marked
from tests.distributed.test_fork_server import LIMIT_S, eventually, lives, started

JOBS = """
import json, os, sys, time
import setproctitle

def tell(number):
    found = {
        "number": number, "had": "decimal" in sys.modules, "env": dict(os.environ),
        "pid": os.getpid(), "cwd": os.getcwd(), "main": "ran" in vars(sys.modules["__main__"]),
    }
    setproctitle.setproctitle("a::title")
    found["title"] = open("/proc/self/cmdline").read().rstrip("\\0")
    print(json.dumps(found), flush=True)
    sys.exit(number)

def sleep():
    print(os.getpid(), flush=True)
    time.sleep(600)
"""
WORKER = """
import os, sys, tempfile, threading
import jobs
from pathlib import Path
from roll.distributed.processes.child_forks import forked_children

temporary = Path(os.environ["TMPDIR"])
assert list(temporary.glob("roll-forks-*/socket")), "the socket is elsewhere"
assert tempfile.gettempdir() == str(temporary), "the folder of the fork server was kept"

ran = True
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.environ["LATER"] = "1"
with forked_children() as context:
    child = context.Process(target=jobs.{job}, args={args})
    os.environ["LATEST"] = "2"
    child.start()
with forked_children() as context:
    assert context is None, "the server was given away twice"
child.join()
print(child.exitcode, flush=True)
"""


TITLED_BY_RAY = """
from ray._raylet import setproctitle

setproctitle("ray::a[0]")
print(open("/proc/self/cmdline").read().rstrip("\\0"))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["decimal", "setproctitle"]) as server:
        yield server


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket, wherever pytest has its own."""
    with tempfile.TemporaryDirectory(prefix="roll-", dir="/tmp") as folder:
        yield Path(folder)


def worker(
    server: ForkServer, folder: Path, job: str, *args: int, **env: str
) -> subprocess.Popen[str]:
    (folder / "jobs.py").write_text(JOBS)
    code = WORKER.format(job=job, args=args)
    return started(server, folder, code, **{FORKS_CHILDREN: "1", "TMPDIR": str(folder)} | env)


def test_a_child_is_a_fork_with_what_the_worker_has_when_it_starts(
    server: ForkServer, tmp_path: Path
) -> None:
    out, err = worker(server, tmp_path, "tell", 5).communicate(timeout=LIMIT_S)
    assert err == ""
    told, code = out.splitlines()
    found = json.loads(told)
    assert found["number"] == 5
    assert found["had"], "the child is a new interpreter"
    assert found["env"]["LATER"] == "1"
    assert found["env"]["LATEST"] == "2"
    assert not found["main"], "the worker's program ran again"
    assert found["title"] == "a::title", "runs find vLLM's core by its title"
    assert code == "5"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "jobs.py",
        "script.py",
    ], "the server's socket was left"


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_not_used(
    server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    (tmp_path / "jobs.py").write_text(JOBS)
    code = WORKER.format(job="tell", args=(5,)).replace("assert list", "assert not list")
    env = {FORKS_CHILDREN: "1", "TMPDIR": str(folder)}
    out, err = started(server, tmp_path, code, **env).communicate(timeout=LIMIT_S)
    assert err == ""
    assert out.splitlines()[1] == "5"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_worker_sees_the_signal_that_ended_its_child(
    server: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    client = worker(server, tmp_path, "sleep")
    assert client.stdout is not None
    os.kill(int(client.stdout.readline()), number)
    assert client.communicate(timeout=LIMIT_S)[0] == f"{-number}\n"


def test_children_carry_the_mark_of_their_worker(server: ForkServer, tmp_path: Path) -> None:
    client = worker(server, tmp_path, "sleep", **{WORKER_TOKEN: "a-token"})
    assert client.stdout is not None
    child = int(client.stdout.readline())
    assert end_marked(f"{WORKER_TOKEN}=a-token", LIMIT_S)
    assert not lives(child)


def test_the_server_ends_with_the_worker_and_its_children(
    server: ForkServer, tmp_path: Path
) -> None:
    client = worker(server, tmp_path, "sleep")
    assert client.stdout is not None
    child = int(client.stdout.readline())
    status = Path(f"/proc/{child}/status").read_text().splitlines()
    parent = next(int(line.split()[1]) for line in status if line.startswith("PPid:"))
    client.kill()
    os.kill(child, signal.SIGKILL)
    assert eventually(lambda: not lives(parent))


def test_ray_names_a_worker_that_has_such_a_server(server: ForkServer, tmp_path: Path) -> None:
    code = WORKER.format(job="tell", args=(0,)) + TITLED_BY_RAY
    (tmp_path / "jobs.py").write_text(JOBS)
    env = {FORKS_CHILDREN: "1", "TMPDIR": str(tmp_path)}
    out, err = started(server, tmp_path, code, **env).communicate(timeout=LIMIT_S)
    assert err == ""
    told, _, title = out.splitlines()
    assert json.loads(told)["title"] == "a::title"
    assert title == "ray::a[0]"


def test_a_worker_that_ends_without_a_child_leaves_no_socket(
    server: ForkServer, tmp_path: Path
) -> None:
    env = {FORKS_CHILDREN: "1", "TMPDIR": str(tmp_path)}
    code = "from pathlib import Path; print(len(list(Path(__file__).parent.glob('roll-forks-*'))))"
    assert started(server, tmp_path, code, **env).communicate(timeout=LIMIT_S)[0] == "1\n"
    assert eventually(lambda: [path.name for path in tmp_path.iterdir()] == ["script.py"])


def test_a_process_without_a_server_has_no_context() -> None:
    with forked_children() as context:
        assert context is None
