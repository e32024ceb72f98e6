"""Programs on other hosts: the same outcomes and verdicts, whatever becomes of the hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from roll.core.errors import ConfigError
from roll.rewards.code.asserts import judge_asserts
from roll.rewards.code.calls import judge_calls
from roll.rewards.code.rows.cases import Call
from roll.sandbox import Job, Limits, NoLevelError, Remote, Sandbox, SandboxError, Status
from roll.sandbox.remote.messages import (
    job_message,
    outcome_message,
    read_job,
    read_outcome,
)
from tests.sandbox.serving import TOKEN, Served, as_piston, as_sandbox_fusion, served
from tests.services import serving_beside

PATIENT = Limits(cpu_s=20, wall_s=60)


@pytest.fixture(scope="module")
def here() -> Iterator[Sandbox]:
    with Sandbox(workers=2, limits=PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def server(here: Sandbox) -> Iterator[Served]:
    with served(here) as running:
        yield running


@pytest.fixture(scope="module")
def far(server: Served) -> Iterator[Sandbox]:
    with Sandbox("remote", remote=Remote([server.url], token=TOKEN), limits=PATIENT) as made:
        yield made


def at(*urls: str, token: str | None = TOKEN, **options: Any) -> Sandbox:
    return Sandbox("remote", remote=Remote(urls, token=token, **options), limits=PATIENT)


PROGRAMS = {
    "print(input())": Status.OK,
    "import sys; sys.exit(7)": Status.FAILED,
    "1 / 0": Status.FAILED,
    "import os; os.abort()": Status.CRASHED,
    "import os; os.write(1, bytes(range(256)))": Status.OK,
    "while True: pass": Status.CPU_TIME,
    "import time; time.sleep(60)": Status.WALL_TIME,
    "x = bytearray(10**12)": Status.MEMORY,
    "while True: print('x' * 999)": Status.OUTPUT,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_outcome_is_that_of_the_same_program_here(
    program: str, here: Sandbox, far: Sandbox
) -> None:
    wall_s = 0.5 if "sleep" in program else 60
    limits = Limits(cpu_s=0.3, wall_s=wall_s, memory_mb=300, output_bytes=5000)
    mine, theirs = (each.run_now(Job(program, "a\n", limits=limits)) for each in (here, far))
    assert theirs.status is mine.status is PROGRAMS[program]
    same = ("exit_code", "signal", "stdout", "stderr", "cut", "reason")
    assert [getattr(theirs, each) for each in same] == [getattr(mine, each) for each in same]
    assert theirs.peak_mb > 1


def test_all_of_a_job_arrives(far: Sandbox) -> None:
    program = (
        "import sys\nprint(open('a').read(), open('b/c', 'rb').read(), sys.stdin.buffer.read())"
    )
    job = Job(program.encode(), b"\xff\n", {"a": "\u00e9", "b/c": b"\x00\xfe"})
    assert far.run_now(job).stdout == "\u00e9 b'\\x00\\xfe' b'\\xff\\n'\n"
    assert far.run_now(Job("print('\ud800')")).ok  # a lone surrogate becomes a question mark


def test_messages_give_back_what_they_were_made_of() -> None:
    job = Job("print()", b"\xff", {"a": b"\x80", "b": "text"})
    limits = Limits(cpu_s=1, addresses_mb=5)
    assert read_job(json.loads(json.dumps(job_message(job, limits)))) == (job, limits)
    with Sandbox(workers=1) as sandbox:
        outcome = sandbox.run_now(Job("print(1)"))
    assert read_outcome(json.loads(json.dumps(outcome_message(outcome)))) == outcome


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "expected a JSON object, found list"),
        ({}, "expected `program`"),
        ({"program": 1}, "program: expected text"),
        ({"program": "", "stdni": ""}, "unknown 'stdni'"),
        ({"program": "", "stdin": {"base64": "?"}}, "stdin: expected text"),
        ({"program": "", "files": []}, "files: expected an object"),
        ({"program": "", "files": {"../a": ""}}, "no path below the program's folder"),
        ({"program": "", "limits": {"cpu": 1}}, "unknown 'cpu'"),
        ({"program": "", "limits": {"cpu_s": "1"}}, "limits.cpu_s: expected a number"),
        ({"program": "", "limits": {"processes": 1.5}}, "limits.processes: expected a number"),
        ({"program": "", "limits": {"cpu_s": True}}, "limits.cpu_s: expected a number"),
        ({"program": "", "limits": {"cpu_s": -1}}, "cpu_s: expected a finite number above 0"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(message: Any, why: str, server: Served) -> None:
    status, told = ask(server.url + "/run", message)
    assert status == 400
    assert why in told["error"]


def ask(url: str, message: Any, token: str = TOKEN, method: str = "POST") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if message is None else json.dumps(message).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("path", ["/health", "/run", "/sessions", "/sessions/x/run", "/odd"])
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_nobody_without_the_token_is_answered(path: str, token: str, server: Served) -> None:
    status, told = ask(server.url + path, {"program": "print(1)"}, token)
    assert status == 401, told
    assert TOKEN not in json.dumps(told)


def test_a_sandbox_with_the_wrong_token_or_address_is_refused_at_once(server: Served) -> None:
    with pytest.raises(NoLevelError, match="refuses the token"):
        at(server.url, token="wrong")
    with pytest.raises(NoLevelError, match="Connection"):
        at("http://127.0.0.1:1", patience_s=1)
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        at("127.0.0.1:8700")
    with pytest.raises(ValueError, match="names the hosts of the level"):
        Sandbox("remote")
    with pytest.raises(ValueError, match="options of the hosts"):
        Sandbox("remote", remote=Remote([server.url]), preload=["numpy"])


def test_health_says_what_runs(server: Served, here: Sandbox) -> None:
    status, told = ask(server.url + "/health", None, method="GET")
    assert status == 200
    assert told["level"] == here.level
    assert (told["workers"], told["running"], told["waiting"]) == (2, 0, 0)


def test_a_session_keeps_its_state_and_ends(far: Sandbox, server: Served) -> None:
    async def calls() -> None:
        async with far.session() as session:
            await session.run("x = 20")
            assert (await session.run("x + 1")).stdout == "21\n"
            assert (await session.run("1 / 0")).status is Status.FAILED
            ended = await session.run("import os; os._exit(3)")
            assert ended.exit_code == 3
            assert not session.open
            with pytest.raises(SandboxError, match="has ended"):
                await session.run("x")

    asyncio.run(calls())
    assert server.server._sessions == {}


def test_verdicts_are_those_of_a_sandbox_here(far: Sandbox) -> None:
    right, wrong = "def f(n): return n + 1", "def f(n): return n"

    async def verdicts(program: str) -> list[bool]:
        called = await judge_calls(far, program, "f", [Call([1], 2), Call([2], 3)])
        asserted = await judge_asserts(far, program, "assert f(1) == 2\nassert f(5) == 6")
        return [each.passed for each in [*called, *asserted]]

    assert asyncio.run(verdicts(right)) == [True] * 4
    assert asyncio.run(verdicts(wrong)) == [False] * 4


def test_a_cancelled_program_is_killed_at_its_host(far: Sandbox, server: Served) -> None:
    async def cancel() -> None:
        running = asyncio.ensure_future(far.run("import time; time.sleep(50)"))
        await until(lambda: server.server._running == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: server.server._running == 0)

    began = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - began < 30
    assert far.run_now(Job("print(1)")).stdout == "1\n"


def test_a_cancelled_call_ends_its_session_at_the_host(far: Sandbox, server: Served) -> None:
    async def cancel() -> None:
        async with far.session() as session:
            running = asyncio.ensure_future(session.run("import time; time.sleep(50)"))
            await until(lambda: server.server._running == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not session.open
        await until(lambda: server.server._running == 0 and not server.server._sessions)

    asyncio.run(cancel())


async def until(done: Any) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_more_programs_than_the_queue_takes_all_end(here: Sandbox) -> None:
    with served(here, queue=1) as small, at(small.url) as sandbox:
        many = Sandbox(
            "remote", workers=12, remote=Remote([small.url], token=TOKEN), limits=PATIENT
        )
        with many:
            jobs = [Job(f"print({n} * 2)") for n in range(60)]
            outcomes = asyncio.run(many.run_batch(jobs))
        assert [int(each.stdout) for each in outcomes] == [n * 2 for n in range(60)]
        assert sandbox.width == 2


def test_a_full_queue_refuses_and_says_so(here: Sandbox) -> None:
    with served(here, queue=0) as small:
        hosts = Remote([small.url], token=TOKEN, patience_s=1)
        slow = Job("import time; time.sleep(20)", limits=PATIENT)
        with Sandbox("remote", workers=3, remote=hosts) as sandbox:
            waiting = [sandbox._submit(slow) for _ in range(2)]
            asyncio.run(until(lambda: small.server._running == 2))
            with pytest.raises(SandboxError, match=r"took a program within 1 s.*no room"):
                sandbox.run_now(Job("print(1)"))
            for each in waiting:
                each.cancel()


def test_a_host_that_is_lost_loses_no_program(here: Sandbox) -> None:
    with served(here) as first, served(here) as second:
        with at(first.url, second.url) as sandbox:
            assert sandbox.width == 4
            jobs = [Job(f"import time; time.sleep(0.05)\nprint({n})") for n in range(40)]
            killer = threading.Timer(0.3, first.stop)
            killer.start()
            outcomes = asyncio.run(sandbox.run_batch(jobs))
            killer.join()
        assert [each.stdout for each in outcomes] == [f"{n}\n" for n in range(40)]
        with pytest.warns(UserWarning, match="does not answer"), at(first.url, second.url) as one:
            assert one.run_now(Job("print(1)")).ok


def test_programs_go_to_the_host_with_the_least_to_do(here: Sandbox) -> None:
    with served(here) as first, served(here) as second, at(first.url, second.url) as sandbox:
        jobs = [sandbox._submit(Job("import time; time.sleep(20)")) for _ in range(4)]
        busy = lambda: (first.server._running, second.server._running)  # noqa: E731
        # Both serve the same two workers here, so two of the four wait for a worker.
        asyncio.run(until(lambda: busy() == (2, 2)))
        for each in jobs:
            each.cancel()


def test_an_idle_session_is_ended(here: Sandbox) -> None:
    async def leave() -> None:
        async with sandbox.session() as session:
            await session.run("x = 1")
            await until(lambda: not short.server._sessions)
            with pytest.raises(SandboxError, match="idle for too long"):
                await session.run("x")

    with served(here, idle_s=0.2) as short, at(short.url) as sandbox:
        asyncio.run(leave())


def test_no_more_sessions_than_allowed_are_open(here: Sandbox) -> None:
    async def third() -> None:
        async with sandbox.session():
            with pytest.raises(SandboxError, match="1 sessions are open"):
                async with sandbox.session():
                    pass

    with served(here, most_sessions=1) as few, at(few.url, patience_s=0.5) as sandbox:
        asyncio.run(third())


def test_a_session_that_nobody_waits_for_any_more_is_ended_when_it_begins(here: Sandbox) -> None:
    async def leave() -> None:
        async with sandbox.session():
            waiting = asyncio.ensure_future(sandbox.session().__aenter__())
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await asyncio.sleep(2)  # longer than the pauses between the questions for room
        assert few.server._sessions == {}

    with served(here, most_sessions=1) as few, at(few.url) as sandbox:
        asyncio.run(leave())


OTHERS = {"sandbox_fusion": as_sandbox_fusion, "piston": as_piston}


@pytest.mark.parametrize("protocol", OTHERS)
def test_services_of_others_run_programs(protocol: str) -> None:
    limits, short = Limits(cpu_s=1, wall_s=30), Limits(cpu_s=1, wall_s=0.5)
    with serving_beside(OTHERS[protocol]) as url, at(url, protocol=protocol) as sandbox:
        right = Job("print(int(input()) * 2, open('a').read())", "21", {"a": "x"}, limits)
        assert sandbox.run_now(right).stdout == "42 x\n"
        ends = {
            "import sys; sys.exit(3)": (Status.FAILED, 3),
            "raise MemoryError": (Status.MEMORY, 1),
            "import time; time.sleep(9)": (Status.WALL_TIME, None),
            "while True: pass": (Status.CPU_TIME, None),
            "import os; os.kill(os.getpid(), 9)": (Status.CRASHED, None),
        }
        for program, (status, code) in ends.items():
            given = short if "sleep" in program else limits
            outcome = sandbox.run_now(Job(program, limits=given))
            assert (outcome.status, outcome.exit_code) == (status, code), (program, outcome)

        async def verdicts(program: str) -> list[bool]:
            calls = [Call([1], 2), Call([2], 3)]
            found = await judge_calls(sandbox, program, "f", calls, limits)
            return [each.passed for each in found]

        assert asyncio.run(verdicts("def f(n): return n + 1")) == [True, True]
        assert asyncio.run(verdicts("import os\ndef f(n): os._exit(0)")) == [False, False]
        with pytest.raises(SandboxError, match="has no sessions"):
            asyncio.run(judge_asserts(sandbox, "def f(n): return n", "assert f(1) == 1"))


def test_errors_of_services_are_no_outcomes() -> None:
    full, late = Job("# no room on the disk"), Job("print(1)", limits=Limits(wall_s=31))
    with serving_beside(as_sandbox_fusion) as url, at(url, protocol="sandbox_fusion") as sandbox:
        found = sandbox._submit(full).future.exception(timeout=60)
    assert isinstance(found, SandboxError)
    assert "the disk is full" in str(found)
    with serving_beside(as_piston) as url, at(url, protocol="piston") as sandbox:
        found = sandbox._submit(late).future.exception(timeout=60)
    assert isinstance(found, ValueError)
    assert "cannot exceed the configured limit of 30000" in str(found)


@pytest.mark.slow
def test_a_service_listens_when_it_says_so_and_ends_by_a_signal() -> None:
    command = [sys.executable, "-m", "roll.cli", "sandbox", "serve", "--workers", "1", "--port"]
    environ = {**os.environ, "ROLL_SANDBOX_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = subprocess.run([*command, port], env=environ, capture_output=True, text=True)
    assert refused.returncode == 2, refused.stderr
    assert f"--port {port}: " in refused.stderr
    assert "listening" not in refused.stdout
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([*command, port], env=environ, stdout=-1, text=True) as process:
            assert process.stdout is not None
            assert any("listening" in line for line in process.stdout)
            socket.create_connection(("127.0.0.1", int(port)), 10).close()
            process.send_signal(number)
            assert process.wait(60) == 128 + number


SERVED = """
import os, signal, sys
from roll.commands.sandbox_serve import serve
from roll.distributed.processes.shutdown import Terminated

def said(line):
    if line.startswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGTERM)

try:
    serve(host="127.0.0.1", port=int(sys.argv[1]), level="none", workers=1, preload=(),
          readable=(), queue=None, sessions=None, said=said)
except Terminated as ended:
    sys.exit(128 + ended.signum)
"""


@pytest.mark.parametrize("line", ["level", "listening"])
def test_a_service_that_has_said_a_line_ends_by_a_signal_in_order(line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    environ = {**os.environ, "ROLL_SANDBOX_TOKEN": TOKEN}
    ended = subprocess.run([sys.executable, "-c", SERVED, port, line], env=environ, timeout=60)
    assert ended.returncode == 128 + signal.SIGTERM


def test_a_token_that_could_be_guessed_is_refused() -> None:
    from roll.commands.sandbox_serve import token_of

    for environ in ({}, {"ROLL_SANDBOX_TOKEN": "short"}):
        with pytest.raises(ConfigError, match="at least 16 ASCII characters"):
            token_of(environ)
    assert token_of({"ROLL_SANDBOX_TOKEN": TOKEN}) == TOKEN
