"""The pool of workers when these are lost, on workers that are scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from roll.sandbox import Job, Limits, Outcome, SandboxError, Status
from roll.sandbox.errors import WorkerLostError
from roll.sandbox.levels import settings
from roll.sandbox.pool import Pool
from roll.sandbox.worker_process import WorkerProcess

DONE = Outcome(Status.OK, 0, None, "", "", False, 0.0, 0.0, 0.0, "")
WAIT_S = 20.0


class Scripted:
    """A worker whose outcomes are given; after these, all jobs are done."""

    def __init__(self, *ends: Exception) -> None:
        self.ends, self.closed = [*ends], False

    def wait(self) -> None:
        pass

    def order(self, job: Job, limits: Limits) -> None:
        assert not self.closed

    def outcome(self, limits: Limits) -> Outcome:
        if self.ends:
            raise self.ends.pop(0)
        return DONE

    def open_session(self, job: Job, limits: Limits) -> None:
        raise NotImplementedError

    def order_call(self, program: bytes) -> None:
        raise NotImplementedError

    def call_outcome(self, limits: Limits) -> tuple[Outcome, bool]:
        raise NotImplementedError

    def end_session(self) -> None:
        raise NotImplementedError

    def cancel(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


@contextmanager
def pool_of(first: Scripted, make: Callable[[], Scripted]) -> Iterator[Pool[Scripted]]:
    pool = Pool(make, [first])
    try:
        yield pool
    finally:
        pool.close()


def run(pool: Pool[Scripted]) -> Outcome:
    return pool.submit(Job(""), Limits()).future.result(WAIT_S)


@pytest.mark.parametrize("error", [SandboxError("no room for a process"), OSError(24, "files")])
def test_a_worker_that_cannot_be_replaced_fails_its_job_and_not_those_after(
    error: Exception,
) -> None:
    makes: list[Exception | Scripted] = [error, error, Scripted()]

    def make() -> Scripted:
        made = makes.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    with pool_of(Scripted(WorkerLostError("killed")), make) as pool:
        for _ in range(2):
            with pytest.raises(type(error), match=r"no room|files"):
                run(pool)
        assert [run(pool), run(pool)] == [DONE, DONE]


def test_a_worker_whose_answer_cannot_be_read_gets_no_other_job() -> None:
    first, second = Scripted(OverflowError("timeout")), Scripted()
    with pool_of(first, lambda: second) as pool:
        with pytest.raises(OverflowError):
            run(pool)
        assert first.closed
        assert run(pool) == DONE
        assert pool.workers == [second]


def test_a_worker_that_refuses_a_job_goes_on() -> None:
    first = Scripted(SandboxError("the level does not work"), ValueError("no program"))
    with pool_of(first, Scripted) as pool:
        for kind in (SandboxError, ValueError):
            with pytest.raises(kind):
                run(pool)
        assert run(pool) == DONE
        assert pool.workers == [first]


def test_a_pool_grows_until_it_is_closed() -> None:
    with pool_of(Scripted(), Scripted) as pool:
        pool.grow(3)
        pool.grow(2)
        assert len(pool.workers) == 3
        workers = [*pool.workers]
    pool.grow(4)
    assert pool.workers == workers
    assert all(each.closed for each in workers)


def test_a_limit_of_years_is_waited_for_as_far_as_the_kernel_can() -> None:
    worker = WorkerProcess(settings("none", (), ()))
    try:
        worker._answer(1e12)
    finally:
        worker.close()
