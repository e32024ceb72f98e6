"""A pool of children outlives everything that befalls one of them."""

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from roll.rewards.execution.child import (
    Child,
    ChildDiedError,
    ChildSpec,
    ChildStalledError,
    ChildTimeoutError,
)
from roll.rewards.execution.child_pool import ChildPool, NoChildFreeError

SPEC = ChildSpec("tests.unit.rewards.child_functions:make_worker")


@contextmanager
def no_more_files() -> Iterator[None]:
    """The process may open no further file, so it can start no child."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno(), hard))
    probe.close()
    taken = []
    try:
        while True:  # fill the numbers below the limit
            taken.append(socket.socket())
    except OSError:
        pass
    try:
        yield
    finally:
        for each in taken:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pool_whose_children_could_not_start_answers_when_they_can() -> None:
    pool = ChildPool(SPEC, size=2)
    try:
        with no_more_files():
            for _ in range(4):
                with pytest.raises(OSError, match="Too many open files"):
                    pool.call("ok", 5.0, queue_timeout_s=5.0)
        assert pool.call("ok", 20.0, queue_timeout_s=20.0) == "ok"
    finally:
        pool.close()


def test_a_child_that_dies_and_cannot_be_replaced_at_once_is_replaced_later() -> None:
    pool = ChildPool(SPEC, size=1)
    try:
        pool.warm_up()
        with no_more_files():
            with pytest.raises(ChildDiedError):
                pool.call("die", 5.0, queue_timeout_s=5.0)
            with pytest.raises(OSError, match="Too many open files"):
                pool.call("ok", 5.0, queue_timeout_s=5.0)
        assert pool.call("ok", 20.0, queue_timeout_s=20.0) == "ok"
    finally:
        pool.close()


def test_no_thread_to_start_a_child_in_loses_no_child() -> None:
    size = threading.stack_size()
    pool = ChildPool(SPEC, size=1)
    try:
        # A stack that no address space can hold: `start` raises RuntimeError, as with EAGAIN.
        threading.stack_size(2**46)
        try:
            assert pool.call("ok", 20.0, queue_timeout_s=20.0) == "ok"
        finally:
            threading.stack_size(size)
        assert pool.call("ok", 20.0, queue_timeout_s=20.0) == "ok"
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("fork", [True, False])
def test_a_limit_of_cpu_time_does_not_count_waiting(fork: bool) -> None:
    child = Child(ChildSpec(SPEC.factory, fork=fork, clock="cpu"))
    try:
        assert child.call("sleep", 0.2) == "sleep"
        with pytest.raises(ChildTimeoutError):
            child.call("spin", 0.2, patience_s=60.0)
        assert child.call("ok", 0.2, patience_s=60.0) == "ok"
        with pytest.raises(ChildStalledError, match="did not get its 5 s of CPU time"):
            child.call("stop", 5.0, patience_s=0.3)
        assert child.call("ok", 5.0) == "ok"
    finally:
        child.close()


def test_a_stalled_child_says_nothing_about_the_call() -> None:
    pool = ChildPool(ChildSpec(SPEC.factory, clock="cpu"), size=1)
    try:
        with pytest.raises(NoChildFreeError, match="CPU time"):
            pool.call("stop", 5.0, patience_s=0.3)
        assert pool.call("ok", 5.0) == "ok"
    finally:
        pool.close()
