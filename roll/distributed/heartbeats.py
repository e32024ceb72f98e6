"""`Heartbeats`: notices processes that are stopped: they do not die, and answer nothing any more.

Every actor is asked for a heartbeat again and again. It answers in a thread of its own, so a long
call does not keep it from that, but what holds the interpreter's lock may. Silence therefore proves
nothing: who is silent is looked at from outside, on its own node. A process that a signal has
stopped counts as dead; so does one that is silent and has computed nothing for `hung_s`. One that
computes is busy, however long it is silent, and the limits of whoever waits for it hold.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.members import Daemon, Member
from roll.platform.processes import Look, look_at

LOGGER = logging.getLogger(__name__)
BEATS_PER_S = 100
"""Of all actors together at most: each costs the driver about a millisecond."""
LOOK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BeatLimits:
    """When a process counts as stopped."""

    pause_s: float = 2.0
    """Between two heartbeats of an actor."""
    silent_s: float = 5.0
    """Silence after which an actor is looked at."""
    stopped_s: float = 3.0
    """How long a process must be stopped: a debugger may stop one for a moment."""
    hung_s: float = 300.0
    """Silence without any computation that counts as death."""


class GivesUp(Protocol):
    """As much of a `Watchdog`."""

    def give_up(self, member: Member | Daemon, reason: str) -> None: ...


@dataclass(slots=True)
class _Pulse:
    """What is known of one actor."""

    ask: Callable[[], Any]
    heard_s: float
    asked: Any = None
    """Reference to the heartbeat that is on its way."""
    stopped_since_s: float | None = None
    cpu_s: float = -1.0
    """At the last look."""
    idle_since_s: float = 0.0


@dataclass(eq=False)
class Heartbeats:
    """Loops in a thread of its own, from its construction to `close`."""

    watchdog: GivesUp
    daemons: Sequence[Daemon]
    limits: BeatLimits
    _pulses: dict[Member, _Pulse] = field(default_factory=dict, init=False)
    _daemon_stops: dict[Daemon, float] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="roll-heartbeats", daemon=True)
        self._thread.start()

    def add(self, member: Member, ask: Callable[[], Any]) -> None:
        """Listen to an actor that has answered.

        Args:
            ask: asks for a heartbeat; a reference to the names of what is stopped below it.
        """
        with self._lock:
            self._pulses[member] = _Pulse(ask, time.monotonic())

    def forget(self, members: Collection[Member]) -> None:
        with self._lock:
            for member in members:
                self._pulses.pop(member, None)

    def close(self) -> None:
        """Listen no more."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=LOOK_TIMEOUT_S)

    def check_daemons(self) -> None:
        """Tell of a process of Ray that is gone, or has been stopped for a while."""
        now_s = time.monotonic()
        for daemon in self.daemons:
            look = look_at(daemon.pid)
            if look is None:
                self._lose(daemon, f"{daemon.name} (pid {daemon.pid}) died")
            elif not look.stopped:
                self._daemon_stops.pop(daemon, None)
            elif now_s - self._daemon_stops.setdefault(daemon, now_s) >= self.limits.stopped_s:
                self._lose(daemon, f"{daemon.name} (pid {daemon.pid}) is stopped (SIGSTOP)")

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.check_daemons()
            with self._lock:
                pulses = dict(self._pulses)
            self._ask(pulses)
            for member, pulse in pulses.items():
                if time.monotonic() - pulse.heard_s > self.limits.silent_s:
                    self._look(member, pulse)
            self._stop.wait(max(self.limits.pause_s, len(pulses) / BEATS_PER_S))

    def _ask(self, pulses: dict[Member, _Pulse]) -> None:
        """Ask everybody who does not owe an answer, and take in those that are there."""
        try:
            for pulse in pulses.values():
                if pulse.asked is None:
                    pulse.asked = pulse.ask()
            asked = {pulse.asked: (member, pulse) for member, pulse in pulses.items()}
            if not asked:
                return
            ready, _ = ray.wait(
                list(asked), num_returns=len(asked), timeout=self.limits.pause_s / 2
            )
        except Exception:
            if not self._stop.is_set():
                LOGGER.warning("heartbeats could not be asked for", exc_info=True)
            return
        for ref in ready:
            member, pulse = asked[ref]
            pulse.asked = None
            try:
                self._hear(member, pulse, ray.get(ref))
            except ray.exceptions.RayError:  # dead, as its watch call tells, or about to be
                continue

    def _hear(self, member: Member, pulse: _Pulse, stopped: Sequence[str]) -> None:
        now_s = pulse.heard_s = time.monotonic()
        pulse.cpu_s = -1.0  # the next silence is another one
        if not stopped:
            pulse.stopped_since_s = None
        elif pulse.stopped_since_s is None:
            pulse.stopped_since_s = now_s
        elif now_s - pulse.stopped_since_s >= self.limits.stopped_s:
            self._lose(member, f"{', '.join(stopped)} of {member.name} is stopped (SIGSTOP)")

    def _look(self, member: Member, pulse: _Pulse) -> None:
        """At one who is silent."""
        assert member.info is not None, "only actors that have answered are asked"
        look = _look_from_outside(member)
        now_s = time.monotonic()
        if look is None:  # its watch call tells of its death
            return
        where = f"{member.name} (pid {member.info.pid}, node {member.info.address})"
        if look.cpu_s > pulse.cpu_s:
            pulse.cpu_s, pulse.idle_since_s = look.cpu_s, now_s
        idle_s = now_s - pulse.idle_since_s
        if not look.stopped:
            pulse.stopped_since_s = None
        elif pulse.stopped_since_s is None:
            pulse.stopped_since_s = now_s
        elif now_s - pulse.stopped_since_s >= self.limits.stopped_s:
            self._lose(member, f"{where} is stopped (SIGSTOP) and answers nothing")
        if idle_s > self.limits.hung_s:
            self._lose(
                member, f"{where} has answered nothing and computed nothing for {idle_s:.0f} s"
            )

    def _lose(self, member: Member | Daemon, reason: str) -> None:
        if member.death is None and not self._stop.is_set():
            if isinstance(member, Member):
                member.lingers = True
            self.watchdog.give_up(member, reason)


def _look_from_outside(member: Member) -> Look | None:
    """At a process that may be on another node; None when it is gone, or that node silent."""
    assert member.info is not None
    try:
        if member.info.node == ray.get_runtime_context().get_node_id():
            return look_at(member.info.pid)
        there = NodeAffinitySchedulingStrategy(member.info.node, soft=False)
        look = ray.remote(num_cpus=0)(look_at).options(scheduling_strategy=there)
        seen: Look | None = ray.get(look.remote(member.info.pid), timeout=LOOK_TIMEOUT_S)
        return seen
    except ray.exceptions.RayError:
        return None
