"""Signals end a run through its cleanups, once and in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo

import pytest

from roll.core.errors import StoppedEarlyError
from roll.distributed.processes.shutdown import (
    StopWish,
    Terminated,
    exit_at_hangup,
    orderly_end,
)


def run_until(end: Callable[[], None], done: list[str]) -> None:
    with orderly_end() as cleanups:
        cleanups.callback(done.append, "first")
        cleanups.callback(done.append, "second")
        end()


def break_down() -> None:
    raise RuntimeError("broken")


def lose_the_signal() -> None:
    """As a wait inside Ray does."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_runs_the_cleanups_in_reverse_and_is_named(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    done: list[str] = []
    with pytest.raises(Terminated, match=signum.name) as caught:
        run_until(lambda: os.kill(os.getpid(), signum), done)
    assert done == ["second", "first"]
    assert caught.value.signum == signum
    assert signal.getsignal(signum) is before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done: list[str] = []
        run_until(lambda: os.kill(os.getpid(), signal.SIGHUP), done)
        assert done == ["second", "first"]
        with exit_at_hangup():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_during_cleanup_does_not_cut_it_short() -> None:
    done: list[str] = []
    with orderly_end() as cleanups:
        cleanups.callback(done.append, "after the signal")
        cleanups.callback(os.kill, os.getpid(), signal.SIGTERM)
    assert done == ["after the signal"]


def test_an_interrupt_that_lost_its_signal_on_the_way_gets_it_back() -> None:
    with pytest.raises(Terminated) as caught:
        run_until(lose_the_signal, [])
    assert caught.value.signum == signal.SIGTERM


def test_an_exception_passes_through_after_the_cleanups() -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError, match="broken"):
        run_until(break_down, done)
    assert done == ["second", "first"]


def test_the_first_signal_asks_for_an_end_and_the_second_ends_at_once() -> None:
    wish = StopWish()
    done: list[str] = []

    def run() -> None:
        with orderly_end() as cleanups, wish.asked_by(signal.SIGTERM):
            cleanups.callback(done.append, "cleaned up")
            assert wish.reason is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert wish.reason == "SIGTERM"
            done.append("went on")
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated, match="SIGTERM"):
        run()
    assert done == ["went on", "cleaned up"]


def test_a_failure_after_the_signal_counts_as_its_work() -> None:
    """A batch system sends it to the workers, too."""

    def fail_after_the_signal() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a worker has died")

    with pytest.raises(Terminated, match="SIGTERM"), StopWish().asked_by(signal.SIGTERM):
        fail_after_the_signal()
    with pytest.raises(StoppedEarlyError), StopWish().asked_by(signal.SIGTERM):
        raise StoppedEarlyError("as asked")
    with pytest.raises(RuntimeError, match="by itself"), StopWish().asked_by(signal.SIGTERM):
        raise RuntimeError("broken by itself")


@pytest.mark.parametrize(
    ("step", "told"), [(None, "behind its first step;"), (3, "behind step 3;")]
)
def test_a_signal_names_the_step_behind_which_the_run_ends(
    step: int | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    wish = StopWish()
    wish.step = step
    with wish.asked_by(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
    assert told in caplog.text


def test_the_handler_of_before_is_back_behind_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopWish().asked_by(signal.SIGTERM):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("zone", [None, UTC])
def test_a_moment_asks_for_an_end_once_it_has_come(zone: tzinfo | None) -> None:
    now = datetime.now(zone)
    assert StopWish(now - timedelta(minutes=1)).reason
    assert not StopWish(now + timedelta(hours=1)).reason
    assert not StopWish(None).reason
