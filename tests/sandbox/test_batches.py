"""Batches of the sandbox, jobs that are cancelled at odd moments, and limits that are none."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from roll.sandbox import Job, Limits, Sandbox, SandboxError, Status
from roll.sandbox.levels import settings
from roll.sandbox.pool import Pool, Ticket
from roll.sandbox.worker_process import WorkerProcess

BRIEF = Limits(cpu_s=2, wall_s=4)
ENDLESS = "import time\nwhile True: time.sleep(0.1)"


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    made = WorkerProcess(settings("none", (), ()))
    made.wait()
    yield made
    made.close()


def test_a_job_that_is_cancelled_on_its_way_to_a_worker_is_not_run(worker: WorkerProcess) -> None:
    ticket = Ticket(Job(ENDLESS), BRIEF)
    assert ticket.future.set_running_or_notify_cancel(), "a thread of the pool has taken it"
    ticket.cancel()
    began = time.monotonic()
    assert ticket.run_on(worker).status is Status.CANCELLED
    assert time.monotonic() - began < BRIEF.wall_s / 2
    assert worker.run(Job("print(1)"), BRIEF).stdout == "1\n"


def test_a_pool_that_closes_ends_a_job_that_a_thread_has_just_taken(worker: WorkerProcess) -> None:
    pool = Pool(lambda: WorkerProcess(settings("none", (), ())), [worker])
    tickets = [pool.submit(Job(ENDLESS), Limits(wall_s=30)) for _ in range(3)]
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    assert all(ticket.future.done() for ticket in tickets)
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        pool.submit(Job(ENDLESS), BRIEF)


def test_an_idle_thread_of_a_pool_forgets_its_last_job(worker: WorkerProcess) -> None:
    pool = Pool(lambda: WorkerProcess(settings("none", (), ())), [worker])
    ticket = pool.submit(Job("print(1)"), BRIEF)
    assert ticket.future.result(timeout=30).stdout == "1\n"
    held = weakref.ref(ticket)
    del ticket
    deadline = time.monotonic() + 60
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() is None
    pool.close()


@pytest.mark.filterwarnings("ignore:the sandbox runs programs at level `none`")
def test_a_batch_with_a_wrong_job_leaves_none_running() -> None:
    with Sandbox("none", workers=1, limits=Limits(wall_s=20)) as sandbox:
        wrong = Job("", files={"a": "x", "b": "y"}, limits=Limits(files=1))
        began = time.monotonic()
        with pytest.raises(ValueError, match="more than the limits allow"):
            asyncio.run(sandbox.run_batch([Job(ENDLESS), Job(ENDLESS), wrong]))
        assert sandbox.run_now(Job("print(2)")).stdout == "2\n"
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["processes", "output_bytes", "files"])
@pytest.mark.parametrize("value", [0, 3.5, 8.0, True, "3"])
def test_a_limit_that_counts_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a whole number above 0, got"):
        Limits(**{name: value})
