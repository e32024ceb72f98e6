"""Who counts as stopped: real processes, looked at as a stopped worker's is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from roll.config.sections.roles import Role
from roll.distributed.heartbeats import BeatLimits, Heartbeats
from roll.distributed.on_ray.host import HostInfo
from roll.distributed.on_ray.members import Daemon, Member
from roll.platform.processes import ProcessState, descendants, process_state, stopped_below

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
    first, busy = process_state(sleeper.pid), process_state(computing.pid)
    assert first is not None
    assert not first.stopped
    assert busy is not None
    deadline = time.monotonic() + 60
    while (later := process_state(computing.pid)) is None or later.cpu_s <= busy.cpu_s:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sleeper.send_signal(signal.SIGSTOP)
    while not (seen := process_state(sleeper.pid)) or not seen.stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_below_is_named(parent: subprocess.Popen[str]) -> None:
    (child,) = descendants(parent.pid)
    assert stopped_below(parent.pid) == []
    os.kill(child, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not (stopped := stopped_below(parent.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [f"process {child} (" in name for name in stopped] == [True]


class Nodes:
    """Actors that answer no heartbeat, and the machines they are on; a reference is
    ("beat" or "look", rank, number)."""

    def __init__(self, looks: dict[str, Callable[[], ProcessState | None] | None]) -> None:
        self._answers = looks
        """By node; None: it never answers."""
        self.members = [
            Member(Role.ACTOR_INFER, "", rank, True, HostInfo(10 + rank, None, node, "", node))
            for rank, node in enumerate(looks)
        ]
        self._number = 0
        self.looked: list[str] = []

    def beat(self, rank: int) -> Any:
        self._number += 1
        return "beat", rank, self._number

    def is_here(self, member: Member) -> bool:
        return False

    def look(self, member: Member) -> Any:
        assert member.info is not None
        self.looked.append(member.info.node)
        self._number += 1
        return "look", member.rank, self._number

    def ready(self, refs: Sequence[Any], timeout_s: float) -> Collection[Any]:
        found = [ref for ref in refs if ref[0] == "look" and self._of(ref) is not None]
        if len(found) < len(refs):
            time.sleep(timeout_s)
        return found

    def get(self, ref: Any) -> Any:
        answer = self._of(ref)
        assert answer is not None
        return answer()

    def _of(self, ref: Any) -> Callable[[], ProcessState | None] | None:
        node = self.members[ref[1]].info
        assert node is not None
        return self._answers[node.node]


def silent(nodes: Nodes, told: Told, limits: BeatLimits) -> Heartbeats:
    beats = Heartbeats(told, [], limits, nodes)
    for member in nodes.members:
        beats.add(member, partial(nodes.beat, member.rank))
    return beats


def stopped() -> ProcessState:
    return ProcessState("it", True, 1.0)


def test_nodes_that_tell_nothing_do_not_keep_a_stop_elsewhere_from_being_noticed() -> None:
    told, nodes = Told(), Nodes({"a": None, "b": None, "c": None, "d": stopped})
    begun = time.monotonic()
    beats = silent(nodes, told, LIMITS)
    (reason,) = told.within(5)
    assert "actor_infer[3] (pid 13, node d) is stopped (SIGSTOP)" in reason
    assert time.monotonic() - begun < 3
    beats.close()
    assert [nodes.looked.count(node) for node in "abc"] == [1, 1, 1], "one look at a time"


def test_a_silent_one_is_lost_with_a_node_that_tells_nothing_of_it() -> None:
    computed = iter(range(10**6))

    def busy() -> ProcessState:
        return ProcessState("it", False, float(next(computed)))

    told, nodes = Told(), Nodes({"a": busy, "b": None, "c": busy})
    limits = BeatLimits(pause_s=0.05, silent_s=0.1, stopped_s=0.2, hung_s=0.5)
    beats = silent(nodes, told, limits)
    (reason,) = told.within(10)
    assert reason.startswith("actor_infer[1] (pid 11, node b) has answered nothing, and its node")
    assert [member.lingers for member in nodes.members] == [False, True, False]
    time.sleep(3 * limits.hung_s)
    assert len(told.reasons) == 1
    beats.close()


def test_one_that_cannot_be_asked_does_not_keep_others_from_being_asked() -> None:
    told, nodes = Told(), Nodes({"a": None, "b": stopped})

    def fails() -> Any:
        raise RuntimeError("no such actor")

    beats = Heartbeats(told, [], LIMITS, nodes)
    beats.add(nodes.members[0], fails)
    beats.add(nodes.members[1], lambda: nodes.beat(1))
    (reason,) = told.within(5)
    assert "actor_infer[1]" in reason
    beats.close()
