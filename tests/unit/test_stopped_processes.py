"""Who counts as stopped: real processes, looked at as a stopped worker's is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from roll.distributed.heartbeats import BeatLimits, Heartbeats
from roll.distributed.members import Daemon, Member
from roll.platform.processes import descendants, look_at, stopped_below

LIMITS = BeatLimits(pause_s=0.05, silent_s=0.1, stopped_s=0.2)
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
COMPUTES = "print('up', flush=True)\nwhile True: pass"
HAS_A_CHILD = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]); "
    "child.wait()"
)


class Told:
    """What a watchdog would be told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def give_up(self, member: Member | Daemon, reason: str) -> None:
        member.death = reason
        self.reasons.append(reason)

    def within(self, limit_s: float) -> list[str]:
        deadline = time.monotonic() + limit_s
        while not self.reasons and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.reasons


def started(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    for pid in [*descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    yield from started(SLEEPS)


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    yield from started(HAS_A_CHILD)


@pytest.fixture
def computing() -> Iterator[subprocess.Popen[str]]:
    yield from started(COMPUTES)


@pytest.mark.parametrize(
    ("signum", "says"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "died")]
)
def test_a_daemon_that_is_stopped_or_killed_is_named(
    sleeper: subprocess.Popen[str], signum: signal.Signals, says: str
) -> None:
    told = Told()
    beats = Heartbeats(told, [Daemon("Ray's raylet", sleeper.pid)], LIMITS)
    assert told.within(0.3) == []
    sleeper.send_signal(signum)  # once killed it stays a zombie: nobody has asked for its end
    assert len(told.within(5)) == 1
    assert told.reasons[0].startswith(f"Ray's raylet (pid {sleeper.pid}) ")
    assert says in told.reasons[0]
    beats.close()


def test_a_process_that_is_let_go_on_in_time_is_not_lost(sleeper: subprocess.Popen[str]) -> None:
    told = Told()
    beats = Heartbeats(told, [Daemon("it", sleeper.pid)], BeatLimits(pause_s=0.02, stopped_s=1.0))
    sleeper.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    sleeper.send_signal(signal.SIGCONT)
    assert told.within(1.2) == []
    beats.close()


def test_a_look_tells_stopped_from_sleeping_and_computing(
    sleeper: subprocess.Popen[str], computing: subprocess.Popen[str]
) -> None:
    first, busy = look_at(sleeper.pid), look_at(computing.pid)
    assert first is not None
    assert not first.stopped
    assert busy is not None
    deadline = time.monotonic() + 20
    while (later := look_at(computing.pid)) is None or later.cpu_s <= busy.cpu_s:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sleeper.send_signal(signal.SIGSTOP)
    while not (seen := look_at(sleeper.pid)) or not seen.stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_below_is_named(parent: subprocess.Popen[str]) -> None:
    (child,) = descendants(parent.pid)
    assert stopped_below(parent.pid) == []
    os.kill(child, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not (stopped := stopped_below(parent.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [f"process {child} (" in name for name in stopped] == [True]
