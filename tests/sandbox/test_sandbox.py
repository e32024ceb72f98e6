"""What a sandbox returns, gives to programs, and does when something around it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.sandbox import Job, Limits, NoLevelError, Sandbox, SandboxError, Status
from roll.sandbox.levels import LEVELS, settings
from roll.sandbox.selftest import find_leak
from roll.sandbox.worker.template_process import FIRST_USER, NOBODY, counts_alone
from roll.sandbox.worker.usage import descendants
from roll.sandbox.worker_process import WorkerProcess

ROOT = Path(__file__).parents[2]
PATIENT = Limits(cpu_s=20, wall_s=60)


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(request.param, workers=2, preload=["numpy"], limits=PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    with Sandbox(workers=1, limits=PATIENT) as made:
        yield made


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while running := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_and_exit_code_are_those_of_python(sandbox: Sandbox) -> None:
    program = (
        "import sys\nname = input()\nprint('hello', name)\nprint('odd', file=sys.stderr)\n"
        "sys.exit(3)"
    )
    outcome = sandbox.run_now(Job(program, "Ana\n"))
    assert (outcome.stdout, outcome.stderr) == ("hello Ana\n", "odd\n")
    assert (outcome.status, outcome.exit_code, outcome.signal) == (Status.FAILED, 3, None)
    assert outcome.reason == "ended with exit code 3"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("exit()", 0),
        ("raise SystemExit(256 + 7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("def f(:", 1),
        ("import atexit, os; atexit.register(lambda: os._exit(5))", 5),
        ("import threading\nthreading.Thread(target=lambda: print('late')).start()", 0),
        ("if __name__ == '__main__': raise SystemExit(9)", 9),
    ],
)
def test_a_program_ends_as_it_would_in_python(strongest: Sandbox, program: str, code: int) -> None:
    """The interpreter itself is the oracle."""
    by_python = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    outcome = strongest.run_now(Job(program))
    assert outcome.exit_code == by_python.returncode == code
    assert outcome.stdout == by_python.stdout
    assert outcome.stderr.splitlines()[-1:] == by_python.stderr.splitlines()[-1:]


def test_a_traceback_shows_the_lines_of_the_program_alone(sandbox: Sandbox) -> None:
    outcome = sandbox.run_now(Job("def f(x):\n    return 1 / x\nf(0)"))
    shown = outcome.stderr.splitlines()
    assert shown[1:3] == ['  File "program.py", line 3, in <module>', "    f(0)"]
    assert outcome.stderr.count("File ") == 2


def test_a_signal_is_named(sandbox: Sandbox) -> None:
    outcome = sandbox.run_now(Job("import os; os.abort()"))
    assert (outcome.status, outcome.exit_code) == (Status.CRASHED, None)
    assert outcome.signal == signal.SIGABRT


def test_limits_are_named(sandbox: Sandbox) -> None:
    cases = {
        "while True: pass": (Limits(cpu_s=0.2, wall_s=60), Status.CPU_TIME),
        "import time; time.sleep(60)": (Limits(wall_s=0.2), Status.WALL_TIME),
        "x = bytearray(10**12)": (Limits(memory_mb=200), Status.MEMORY),
        "while True: print('x' * 999)": (Limits(output_bytes=10_000), Status.OUTPUT),
    }
    for program, (limits, status) in cases.items():
        outcome = sandbox.run_now(Job(program, limits=limits))
        assert outcome.status is status, outcome
        assert outcome.reason
    assert outcome.cut
    assert len(outcome.stdout) == 10_000


def test_preloaded_modules_draw_other_numbers_each_time(sandbox: Sandbox) -> None:
    program = (
        "import sys; loaded = 'numpy' in sys.modules\n"
        "import numpy, random; print(loaded, numpy.random.rand(), random.random())"
    )
    outcomes = [sandbox.run_now(Job(program)) for _ in range(3)]
    assert all(outcome.stdout.startswith("True ") for outcome in outcomes), outcomes[0]
    for place in (1, 2):
        assert len({outcome.stdout.split()[place] for outcome in outcomes}) == 3


def test_files_are_given_where_a_level_can(sandbox: Sandbox) -> None:
    job = Job(
        "import part.two; print(part.two.x, open('data.txt').read(), open('raw', 'rb').read())",
        files={"part/two.py": "x = 2", "data.txt": "ä\n", "raw": b"\xff\x00"},
    )
    if sandbox.level == "strict":
        with pytest.raises(ValueError, match="files: at level `strict`"):
            sandbox.run_now(job)
    else:
        assert sandbox.run_now(job).stdout == "2 ä\n b'\\xff\\x00'\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_a_file_outside_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no path below"):
        Job("", files={name: "x"})


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="memory_mb: expected a finite number above 0, got"):
        Limits(memory_mb=value)


def test_what_programs_commonly_use_works(sandbox: Sandbox) -> None:
    programs = [
        "import asyncio\nasync def f(): await asyncio.sleep(0); print(1)\nasyncio.run(f())",
        "import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()",
        "import sys\nsys.setrecursionlimit(10**6)\nf = lambda n: n and f(n - 1)\n"
        "f(20_000); print(1)",
        "from concurrent.futures import ThreadPoolExecutor as T\nprint(*T(2).map(int, '1'))",
        "import sqlite3\nprint(*sqlite3.connect(':memory:').execute('select 1').fetchone())",
        "import decimal, fractions, heapq, bisect, re, statistics, uuid, hashlib; print(1)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): print(2)\nprint(1)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): print(1)\n"
        "unittest.main(exit=False, argv=['x'])",
        "import multiprocessing, time, os; print(len(os.sched_getaffinity(0)) >= 1 and 1)",
        "x = 'é'.encode('latin-1').decode('cp1252').encode('utf-16'); print(1)",
        "import numpy as np; print(np.linalg.det(np.eye(3)).astype(int))",
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
        "print(pickle.loads(pickle.dumps(A(1))).x)",
    ]
    for program in programs:
        outcome = sandbox.run_now(Job(program))
        assert (outcome.stdout, outcome.status) == ("1\n", Status.OK), (program, outcome)


def test_processes_and_files_work_in_namespaces(strongest: Sandbox) -> None:
    if strongest.level != "namespaces":
        pytest.skip("no namespaces here")
    programs = [
        "import subprocess as s, sys\ns.run([sys.executable, '-c', 'print(1)'], check=True)",
        "import multiprocessing as m; print(*m.Pool(2).map(abs, [-1]))",
        "import tempfile as t\nf = t.NamedTemporaryFile('w+'); f.write('1'); f.seek(0); print(*f)",
        "print(open('/dev/stdin').read())",
        "import os; print(1, file=open('/dev/stdout', 'w'))",
    ]
    for program in programs:
        outcome = strongest.run_now(Job(program, "1"))
        assert outcome.stdout.split()[0] == "1", (program, outcome)
        assert outcome.ok


def test_a_batch_keeps_its_order(sandbox: Sandbox) -> None:
    jobs = [Job(f"import time; time.sleep({(7 * n) % 5 / 200}); print({n})") for n in range(20)]
    outcomes = asyncio.run(sandbox.run_batch(jobs))
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n" for n in range(20)]


def test_a_job_that_nobody_awaits_is_killed(strongest: Sandbox) -> None:
    async def leave() -> float:
        endless = asyncio.ensure_future(strongest.run("while True: pass"))
        waits = asyncio.ensure_future(strongest.run("print(2)"))
        await asyncio.sleep(0.05)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert (await waits).stdout == "2\n"
        return time.monotonic() - began

    began = time.monotonic()
    assert asyncio.run(leave()) < 10  # the limits are 20 and 60 s


def test_a_session_keeps_its_state(sandbox: Sandbox) -> None:
    async def calls() -> None:
        async with sandbox.session(PATIENT) as session:
            first = await session.run("import math\ndef f(x): return math.sqrt(x)")
            assert (first.status, first.exit_code, first.stdout) == (Status.OK, None, "")
            assert (await session.run("y = f(16)\ny")).stdout == "4.0\n"
            wrong = await session.run("print('before')\nz")
            assert (wrong.status, wrong.stdout) == (Status.FAILED, "before\n")
            assert wrong.stderr.endswith("NameError: name 'z' is not defined\n")
            assert (await session.run("y")).stdout == "4.0\n"
            last = await session.run("exit(4)")
            assert (last.exit_code, session.open) == (4, False)
            with pytest.raises(SandboxError, match="has ended"):
                await session.run("y")

    asyncio.run(calls())


def test_a_session_ends_at_a_limit_and_does_not_run_on(strongest: Sandbox) -> None:
    async def calls() -> None:
        limits = Limits(cpu_s=20, wall_s=0.3)
        async with strongest.session(limits) as session:
            outcome = await session.run("while True: pass")
            assert outcome.status is Status.WALL_TIME
        program = (
            "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()"
        )
        async with strongest.session(PATIENT) as session:
            await session.run(program)
            assert isinstance(session._worker, WorkerProcess)
            family = [*descendants([session._worker.pid])]
            deadline = time.monotonic() + 60
            while all(map(alive, family)):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            outcome = await session.run("print(1)")
            assert outcome.status is Status.CPU_TIME
            assert "between two calls" in outcome.reason

    asyncio.run(calls())


def test_sessions_that_begin_together_find_the_workers_of_those_before(strongest: Sandbox) -> None:
    """As the episodes of each step do: to start a worker takes far longer than a session."""

    async def together() -> set[int]:
        async def one(ready: asyncio.Barrier) -> int:
            async with strongest.session(PATIENT) as session:
                await ready.wait()
                assert (await session.run("6 * 7")).stdout == "42\n"
                assert isinstance(session._worker, WorkerProcess)
                return session._worker.pid

        ready = asyncio.Barrier(6)
        return set(await asyncio.gather(*(one(ready) for _ in range(6))))

    first = asyncio.run(together())
    assert len(first) == 6
    assert asyncio.run(together()) == first


def test_a_session_finds_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    async def calls() -> list[int]:
        workers = []
        for _ in range(2):
            async with sandbox.session(PATIENT) as session:
                assert (await session.run("'x' in globals()")).stdout == "False\n"
                await session.run("x = 1\nimport builtins; builtins.x = 1")
                assert isinstance(session._worker, WorkerProcess)
                workers.append(session._worker.pid)
        return workers

    first, second = asyncio.run(calls())
    assert first == second  # the worker is the same, and its process for programs another


def test_a_killed_worker_leaves_nothing_and_its_job_is_run_again(sandbox: Sandbox) -> None:
    with Sandbox(sandbox.level, workers=1, limits=PATIENT) as one:
        worker = one._pool.workers[0].pid

        async def kill() -> str:
            job = asyncio.ensure_future(one.run("import time; time.sleep(0.5); print(1)"))
            await asyncio.sleep(0.2)
            family.extend(descendants([worker]))
            os.kill(worker, signal.SIGKILL)
            return (await job).stdout

        family: list[int] = []
        assert asyncio.run(kill()) == "1\n"
        assert len(family) >= 3
        until_gone(family)


def test_nothing_is_left_when_the_program_around_it_is_killed() -> None:
    code = (
        "import os, sys, threading, time\nfrom roll.sandbox import *\n"
        "from roll.sandbox.worker.usage import descendants\ns = Sandbox(workers=2)\n"
        "threading.Thread(target=s.run_now, args=(Job('while True: pass'),), daemon=True).start()\n"
        "time.sleep(0.3)\nprint(*descendants([os.getpid()]), flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    family = [int(pid) for pid in process.stdout.readline().split()]
    assert len(family) >= 5
    process.kill()
    process.wait()
    until_gone(family)


def test_nothing_is_left_of_a_worker_that_is_killed_at_any_moment(strongest: Sandbox) -> None:
    """Also of one whose processes are just being made, and know no parent in their namespace."""
    if os.geteuid() != 0:
        pytest.skip("the user of jobs is told from others where root gives each worker its own")
    users = []
    for n in range(15):
        worker = WorkerProcess(settings(strongest.level, (), ()))
        worker.wait()
        users.append(FIRST_USER + worker.pid)
        worker.order(Job("import time; time.sleep(30)"), PATIENT)
        time.sleep(n / 2500)
        os.kill(worker.pid, signal.SIGKILL)
        worker.close()

    def left() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int((entry / "status").read_text().split("Uid:")[1].split()[0]) in users:
                    found.append(entry.name)
        return found

    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left() == []


@pytest.mark.parametrize(
    ("level", "user", "alone"),
    [
        ("namespaces", None, True),
        ("namespaces", NOBODY, True),
        ("landlock", FIRST_USER + 7, True),
        ("strict", FIRST_USER + 7, True),
        ("landlock", NOBODY, False),  # the user of all workers
        ("strict", NOBODY, False),
        ("landlock", None, False),
        ("none", FIRST_USER + 7, False),
    ],
)
def test_the_kernel_limits_processes_only_where_it_counts_no_others(
    level: str, user: int | None, alone: bool
) -> None:
    assert counts_alone(level, user) is alone


def test_a_template_that_dies_is_replaced(strongest: Sandbox) -> None:
    worker = strongest._pool.workers[0].pid
    strongest.run_now(Job("print(1)"))
    template = next(pid for pid in descendants([worker]) if pid != worker)
    os.kill(template, signal.SIGKILL)
    assert strongest.run_now(Job("print(2)")).stdout == "2\n"
    assert strongest._pool.workers[0].pid != worker
    until_gone([worker])


def test_the_self_test_finds_what_no_isolation_lets_through() -> None:
    worker = WorkerProcess(settings("none", (), ()))
    try:
        worker.wait()
        assert find_leak(worker, "none") == ""
        assert find_leak(worker, "namespaces") == "a file was read"
    finally:
        worker.close()


def test_no_isolation_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="can do what this process can"):
        Sandbox("none", workers=1).close()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level: unknown 'docker'; expected one of auto, namesp"):
        Sandbox("docker")


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(NoLevelError, match="No module named 'no_such_module'"):
        Sandbox("strict", preload=["no_such_module"])


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the container's filter is for x86_64")
def test_a_container_gets_landlock_and_is_told_why_not_more() -> None:
    code = (
        "from tests.sandbox import container_filter; container_filter.install()\n"
        "from roll.sandbox import Sandbox, NoLevelError\n"
        "with Sandbox(workers=1) as s: print(s.level, s.refused)\n"
        "try: Sandbox('namespaces')\nexcept NoLevelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("landlock {'namespaces': 'PermissionError: "), done
    assert "unshare: Operation not permitted" in lines[0]
    assert lines[1] == "no level of the sandbox works on this machine:"
    assert "needs Linux 5.14 with user namespaces" in lines[2]
    assert lines[3].endswith("level='none'")


def test_closing_kills_what_runs_and_refuses_what_comes(sandbox: Sandbox) -> None:
    one = Sandbox(sandbox.level, workers=1, limits=PATIENT)
    runs, waits = (one._submit(Job("while True: pass")).future for _ in range(2))
    while not runs.running():
        time.sleep(0.01)
    time.sleep(0.05)
    one.close()
    assert runs.result(timeout=0).status is Status.CANCELLED
    for ask in (waits.result, lambda: one.run_now(Job(""))):
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            ask()
    one.close()


def test_more_files_than_the_limits_allow_are_refused(strongest: Sandbox) -> None:
    with pytest.raises(ValueError, match="files: 2 with 3 bytes are more than the limits allow"):
        strongest.run_now(Job("", files={"a": "xx", "b": "y"}, limits=Limits(files=1)))


def test_a_limit_holds_from_the_program_on_not_for_its_preparation(sandbox: Sandbox) -> None:
    """Reading so long a program takes longer than it may run."""
    program = "#" + "x" * 50_000_000
    outcome = sandbox.run_now(Job(program, limits=Limits(wall_s=0.001)))
    assert outcome.status in (Status.WALL_TIME, Status.OK)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_interpreter_that_the_user_cannot_start_is_named(tmp_path: Path) -> None:
    """An interpreter in a folder of root's, as in many images."""
    tmp_path.chmod(0o700)
    code = (
        "import os, sys, shutil; from roll.sandbox import NoLevelError, Sandbox\n"
        f"shutil.copy(os.path.realpath(sys.executable), {str(tmp_path / 'copy')!r})\n"
        f"sys.executable = {str(tmp_path / 'copy')!r}\n"
        "os.setgroups([]); os.setresgid(23456, 23456, 23456); os.setresuid(23456, 23456, 23456)\n"
        "try: Sandbox()\nexcept NoLevelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"cannot start {tmp_path / 'copy'} as user 23456: Permission denied" in done.stdout, done
