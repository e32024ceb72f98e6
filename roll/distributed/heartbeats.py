"""`Heartbeats`: notices processes that are stopped: they do not die, and answer nothing any more.

Every actor is asked for a heartbeat again and again. It answers in a thread of its own, so a long
call does not keep it from that, but what holds the interpreter's lock may. Silence therefore proves
nothing: who is silent is looked at from outside, on its own node. A process that a signal has
stopped counts as dead; so does one that is silent and has computed nothing for `hung_s`. One that
computes is busy, however long it is silent, and the limits of whoever waits for it hold. A silent
one whose node tells nothing of it for `hung_s` either is lost with that node. No answer is waited
for longer than others: a node that hangs does not keep the stops on other nodes from being noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from roll.distributed.on_ray.looks import RayLooks
from roll.distributed.on_ray.members import Daemon, Member
from roll.platform.processes import Look, look_at

LOGGER = logging.getLogger(__name__)
BEATS_PER_S = 100
"""Of all actors together at most: each costs the driver about a millisecond."""
CLOSE_TIMEOUT_S = 10.0


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
    """Silence that counts as death, where nothing is computed or the node tells nothing."""


class GivesUp(Protocol):
    """As much of a `Watchdog`."""

    def give_up(self, member: Member | Daemon, reason: str) -> None: ...


class Looks(Protocol):
    """As much of `RayLooks`, where it is described."""

    def is_here(self, member: Member) -> bool: ...

    def look(self, member: Member) -> Any: ...

    def ready(self, refs: Sequence[Any], timeout_s: float) -> Collection[Any]: ...

    def get(self, ref: Any) -> Any: ...


@dataclass(slots=True)
class _Pulse:
    """What is known of one actor."""

    ask: Callable[[], Any]
    heard_s: float
    asked: Any = None
    """Reference to the heartbeat that is on its way."""
    looking: Any = None
    """Reference to the look from its own node that is on its way."""
    unseen_since_s: float | None = None
    """Since when that node tells nothing of it."""
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
    looks: Looks = field(default_factory=RayLooks)
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
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

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
            for member, pulse in pulses.items():
                try:
                    self._ask(member, pulse)
                except Exception:  # noqa: BLE001 - of one, who is silent then, and looked at
                    self._warn(f"{member.name} could not be asked for a heartbeat")
            self._take_answers(pulses)
            self._stop.wait(max(self.limits.pause_s, len(pulses) / BEATS_PER_S))

    def _ask(self, member: Member, pulse: _Pulse) -> None:
        """Ask for a heartbeat whoever owes none, and look at whoever is silent."""
        now_s = time.monotonic()
        if now_s - pulse.heard_s > self.limits.silent_s:
            if self.looks.is_here(member):
                assert member.info is not None
                self._see(member, pulse, look_at(member.info.pid))
            elif pulse.looking is None:
                if pulse.unseen_since_s is None:
                    pulse.unseen_since_s = now_s
                pulse.looking = self.looks.look(member)
        if pulse.asked is None:
            pulse.asked = pulse.ask()

    def _take_answers(self, pulses: dict[Member, _Pulse]) -> None:
        """Take in all heartbeats and looks that are there."""
        beats = {p.asked: (m, p) for m, p in pulses.items() if p.asked is not None}
        views = {p.looking: (m, p) for m, p in pulses.items() if p.looking is not None}
        refs = [*beats, *views]
        try:
            ready = self.looks.ready(refs, self.limits.pause_s / 2) if refs else []
        except Exception:  # noqa: BLE001 - the watch goes on
            self._warn("heartbeats could not be waited for")
            return
        for ref, (member, pulse) in beats.items():
            if ref in ready:
                pulse.asked = None
                with suppress(ray.exceptions.RayError):  # dead, as its watch call tells, or soon
                    self._hear(member, pulse, self.looks.get(ref))
        for ref, (member, pulse) in views.items():
            if ref in ready and pulse.looking is ref:
                pulse.looking = None
                with suppress(ray.exceptions.RayError):  # its node may be gone, with its watch call
                    self._see(member, pulse, self.looks.get(ref))
        for member, pulse in pulses.items():
            self._miss(member, pulse)

    def _hear(self, member: Member, pulse: _Pulse, stopped: Sequence[str]) -> None:
        now_s = pulse.heard_s = time.monotonic()
        pulse.cpu_s = -1.0  # the next silence is another one
        pulse.looking = pulse.unseen_since_s = None
        if not stopped:
            pulse.stopped_since_s = None
        elif pulse.stopped_since_s is None:
            pulse.stopped_since_s = now_s
        elif now_s - pulse.stopped_since_s >= self.limits.stopped_s:
            self._lose(member, f"{', '.join(stopped)} of {member.name} is stopped (SIGSTOP)")

    def _see(self, member: Member, pulse: _Pulse, look: Look | None) -> None:
        """What one who is silent is doing."""
        now_s = time.monotonic()
        pulse.unseen_since_s = None
        if look is None:  # its watch call tells of its death
            return
        where = _place(member)
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

    def _miss(self, member: Member, pulse: _Pulse) -> None:
        """One who is silent, and of whom its node may tell nothing either."""
        if pulse.unseen_since_s is None:
            return
        unseen_s = time.monotonic() - pulse.unseen_since_s
        if unseen_s > self.limits.hung_s:
            self._lose(
                member,
                f"{_place(member)} has answered nothing, and its node told nothing of it, for "
                f"{unseen_s:.0f} s; that machine may hang or be cut off",
            )

    def _lose(self, member: Member | Daemon, reason: str) -> None:
        if member.death is None and not self._stop.is_set():
            if isinstance(member, Member):
                member.lingers = True
            self.watchdog.give_up(member, reason)

    def _warn(self, what: str) -> None:
        if not self._stop.is_set():
            LOGGER.warning("%s", what, exc_info=True)


def _place(member: Member) -> str:
    assert member.info is not None, "only actors that have answered are asked"
    return f"{member.name} (pid {member.info.pid}, node {member.info.address})"
