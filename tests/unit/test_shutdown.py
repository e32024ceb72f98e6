"""Signals end a run through its cleanups, once and in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from roll.distributed.processes.shutdown import Terminated, orderly_end


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
