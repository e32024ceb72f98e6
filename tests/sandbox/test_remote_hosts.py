"""Which host gets a program, and how often, when scripted hosts refuse, break off or come late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from aiohttp import web

from roll.core.threads.loop_thread import LoopThread
from roll.sandbox import Job, Limits, NoLevelError, Outcome, Remote, Sandbox, SandboxError, Status
from roll.sandbox.remote.connection import Connection
from roll.sandbox.remote.dialects import DIALECTS
from roll.sandbox.remote.hosts import Hosts
from roll.sandbox.remote.messages import PROTOCOL, outcome_message
from roll.sandbox.remote.start import HELLO_CHARS
from roll.sandbox.remote.worker import MOST_LOST, RemoteWorker

HELLO = "42".ljust(HELLO_CHARS, ".")
DONE = Outcome(Status.OK, 0, None, HELLO, "", False, 0.0, 0.0, 0.0, "")
LIMITS = Limits(wall_s=5)


def done() -> web.StreamResponse:
    return web.json_response(outcome_message(DONE))


def refusal(status: int) -> Callable[[], web.StreamResponse]:
    return lambda: web.json_response({"error": "cannot"}, status=status)


class Scripted:
    """A host that answers programs as told."""

    def __init__(self, answer: Callable[[], web.StreamResponse] | None, workers: int = 1) -> None:
        self.answer, self.workers = answer, workers
        """Function that makes the answer; None: it breaks off after `lost_after_s`."""
        self.lost_after_s, self.breaks = 0.0, 0
        self.programs, self.port = 0, 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            told = {"protocol": PROTOCOL, "level": "landlock", "workers": self.workers}
            return web.json_response(told)
        self.programs += 1
        if self.answer is not None and self.programs > self.breaks:
            return self.answer()
        await asyncio.sleep(self.lost_after_s)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]
        return runner

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def up(*hosts: Scripted) -> Iterator[list[str]]:
    with LoopThread("hosts") as loop:
        runners = [loop.run(each.serve()) for each in hosts]
        try:
            yield [each.url for each in hosts]
        finally:
            for runner in runners:
                loop.run(runner.cleanup())


@contextmanager
def asking(urls: list[str], patience_s: float = 5.0) -> Iterator[RemoteWorker]:
    with contextlib.closing(RemoteWorker(Remote(urls, patience_s=patience_s), Hosts(urls))) as one:
        yield one


def run(worker: RemoteWorker, limits: Limits = LIMITS) -> Outcome:
    worker.order(Job("print(42)"), limits)
    return worker.outcome(limits)


@pytest.mark.parametrize("status", [401, 429, 500, 502, 503])
def test_a_host_that_refuses_is_left_alone_while_another_one_works(status: int) -> None:
    bad, good = Scripted(refusal(status)), Scripted(done)
    with up(bad, good) as urls, asking(urls) as worker:
        assert [run(worker) for _ in range(5)] == [DONE] * 5
    assert (bad.programs, good.programs) == (1, 5)


def test_an_answer_that_is_none_is_a_fault_of_its_host() -> None:
    odd, good = Scripted(lambda: web.json_response({"odd": 1})), Scripted(done)
    with up(odd, good) as urls, asking(urls) as worker:
        assert run(worker) == DONE
    assert (odd.programs, good.programs) == (1, 1)


def test_a_program_that_no_host_can_run_is_tried_once_at_each() -> None:
    hosts = [Scripted(refusal(500)) for _ in range(3)]
    refused = pytest.raises(SandboxError, match="status 500: cannot")
    with up(*hosts) as urls, asking(urls) as worker, refused:
        run(worker)
    assert [each.programs for each in hosts] == [1, 1, 1]


def test_a_wrong_request_is_refused_by_one_host_and_costs_it_nothing() -> None:
    first, second = Scripted(refusal(400)), Scripted(refusal(400))
    with up(first, second) as urls, asking(urls) as worker:
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot"):
                run(worker)
    assert (first.programs, second.programs) == (2, 0)


def test_time_that_a_program_ran_is_no_waiting_for_a_host() -> None:
    host = Scripted(done)
    host.breaks, host.lost_after_s = 1, 0.3
    with up(host) as urls, asking(urls, patience_s=0.2) as worker:
        assert run(worker) == DONE
    assert host.programs == 2


def test_a_program_with_which_every_host_is_lost_is_given_up() -> None:
    host = Scripted(None)
    given_up = pytest.raises(SandboxError, match="given up with the 4th host that was lost")
    with up(host) as urls, asking(urls) as worker, given_up:
        run(worker)
    assert host.programs == MOST_LOST == 4


def test_a_host_that_was_down_at_the_start_counts_when_it_comes() -> None:
    def threads() -> int:
        return len([thread for thread in threading.enumerate() if thread.name == "sandbox"])

    before = threads()
    first, late = Scripted(done, workers=1), Scripted(done, workers=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        late.port = free.getsockname()[1]
    with ExitStack() as stack:
        stack.enter_context(up(first))
        remote = Remote([first.url, late.url])
        with pytest.warns(UserWarning, match="does not answer"):
            sandbox = stack.enter_context(Sandbox("remote", remote=remote, limits=LIMITS))
        assert (sandbox.width, sandbox.host_levels) == (2, {first.url: "landlock"})
        stack.enter_context(up(late))
        for host in sandbox._hosts:
            host.paused_until = 0.0
        jobs = [Job("print(42)") for _ in range(20)]
        assert all(each.ok for each in asyncio.run(sandbox.run_batch(jobs)))
        assert sandbox.width == 4
        assert sandbox.host_levels == {first.url: "landlock", late.url: "landlock"}
        assert threads() - before == 4


def piston(**ran: object) -> Outcome:
    """Return the outcome of an answer of Piston's newer versions."""
    told = {"stdout": "", "stderr": "", "code": None, "signal": "SIGKILL", **ran}
    return DIALECTS["piston"].outcome({"run": told}, LIMITS, wall_s=1.0)


def test_piston_is_asked_for_its_time_on_the_cpu_and_told_apart_by_it() -> None:
    for limits, cpu_ms in ((LIMITS, 5000), (Limits(cpu_s=1.5, wall_s=5), 3000)):
        assert DIALECTS["piston"].message(Job(""), limits)["run_cpu_time"] == cpu_ms
    told = {"run": {"status": "TO", "cpu_time": 3010, "signal": "SIGKILL"}}
    busy = DIALECTS["piston"].outcome(told, Limits(cpu_s=2, wall_s=9), wall_s=3.1)
    assert (busy.status, busy.reason) == (Status.CPU_TIME, "used more than 2 s of CPU time")
    assert piston(status="TO", cpu_time=20).status is Status.WALL_TIME


@pytest.mark.parametrize("status", ["OL", "EL"])
def test_output_that_the_host_itself_cuts_is_told_so(status: str) -> None:
    short, long = (
        piston(status=status, stdout="x" * 1024),
        piston(status=status, stdout="x" * 2**20),
    )
    assert short.status is long.status is Status.OUTPUT
    assert "raise its PISTON_OUTPUT_MAX_SIZE" in short.reason
    assert long.reason == "wrote more than 1048576 bytes"


def test_a_host_that_cuts_two_thousand_characters_is_refused_at_the_start() -> None:
    def cut() -> web.StreamResponse:
        ran = {"stdout": "4" * 1024, "stderr": "", "code": None, "signal": "SIGKILL"}
        return web.json_response({"run": {**ran, "status": "OL"}})

    with up(Scripted(cut)) as urls, pytest.raises(NoLevelError, match="PISTON_OUTPUT_MAX_SIZE"):
        Sandbox("remote", remote=Remote(urls, protocol="piston"))


def test_a_limit_of_years_is_waited_for_as_far_as_the_kernel_can() -> None:
    with up(Scripted(done)) as urls, asking(urls) as worker:
        assert run(worker, Limits(wall_s=1e12)) == DONE


def test_a_machine_that_is_gone_is_noticed_within_minutes() -> None:
    with up(Scripted(done)) as (url,):
        connection = Connection(url, {})
        link = connection._connected()
        keys = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, each_s, count = (link.getsockopt(socket.IPPROTO_TCP, key) for key in keys)
        connection.close()
    assert idle_s + each_s * count < 180
