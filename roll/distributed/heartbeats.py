"""`Heartbeats`: notices processes that are stopped or hang. They have not died, but do not answer.

Every actor is asked for heartbeats all the time. It answers in a separate thread, so a long call of
the worker does not delay the answer; but code that holds Python's global interpreter lock does. So
silence alone proves nothing. The process of a silent actor is inspected from outside, on its node:

* A process that a signal has stopped (for `stopped_s`) counts as dead.
* A silent process that has used no CPU time for `hung_s` counts as dead.
* A silent process that uses CPU time counts as busy; only the time limits of its callers apply.
* If the node reports nothing about a silent process for `hung_s`, the process counts as dead: the
  node probably hangs or is cut off.

The answers of all actors are awaited together, so a node that hangs does not delay the detection of
stopped processes on other nodes.
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

from roll.distributed.on_ray.looks import RayInspector
from roll.distributed.on_ray.members import Daemon, Member
from roll.platform.processes import ProcessState, process_state

LOGGER = logging.getLogger(__name__)
BEATS_PER_S = 100
"""Maximum number of heartbeats per second, over all actors. Each takes the driver about a
millisecond."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BeatLimits:
    """Time limits after which a process counts as stopped or dead."""

    pause_s: float = 2.0
    """Pause between two heartbeats of an actor, in seconds."""
    silent_s: float = 5.0
    """Time without an answer after which the process of an actor is inspected, in seconds."""
    stopped_s: float = 3.0
    """Time for which a process must be stopped before it counts as dead, in seconds. A debugger may
    stop a process for a moment."""
    hung_s: float = 300.0
    """Time without an answer after which a process counts as dead, in seconds, if it uses no CPU
    time or its node reports nothing about it."""


class GivesUp(Protocol):
    """The part of `Watchdog` that `Heartbeats` uses."""

    def give_up(self, member: Member | Daemon, reason: str) -> None: ...


class Looks(Protocol):
    """The part of `RayInspector` that `Heartbeats` uses; the methods are described there."""

    def is_here(self, member: Member) -> bool: ...

    def look(self, member: Member) -> Any: ...

    def ready(self, refs: Sequence[Any], timeout_s: float) -> Collection[Any]: ...

    def get(self, ref: Any) -> Any: ...


@dataclass(slots=True)
class _Pulse:
    """State of one actor: its last answer, and what was seen of its process."""

    ask: Callable[[], Any]
    """Function that asks for a heartbeat and returns the reference to the answer."""
    heard_s: float
    """Time of the last answer; all times are readings of `time.monotonic`, in seconds."""
    asked: Any = None
    """Reference to the heartbeat that is awaited, or None."""
    looking: Any = None
    """Reference to the inspection on the actor's node that is awaited, or None."""
    unseen_since_s: float | None = None
    """Time since which the node reports nothing about the silent process, or None."""
    stopped_since_s: float | None = None
    """Time since which the actor or a process below it is stopped, or None."""
    cpu_s: float = -1.0
    """CPU time of the process at the last inspection, in seconds; -1 if there was none."""
    idle_since_s: float = 0.0
    """Time since which `cpu_s` has not grown."""


@dataclass(eq=False)
class Heartbeats:
    """A thread that asks for heartbeats and inspects silent processes, from the construction of
    this object until `close`. It reports dead processes to the watchdog."""

    watchdog: GivesUp
    daemons: Sequence[Daemon]
    limits: BeatLimits
    looks: Looks = field(default_factory=RayInspector)
    _pulses: dict[Member, _Pulse] = field(default_factory=dict, init=False)
    _daemon_stops: dict[Daemon, float] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="roll-heartbeats", daemon=True)
        self._thread.start()

    def add(self, member: Member, ask: Callable[[], Any]) -> None:
        """Begin to ask an actor for heartbeats. The actor must have answered once already.

        Args:
            ask: function that asks for a heartbeat and returns the reference to the answer: the
                names of stopped processes below the actor.
        """
        with self._lock:
            self._pulses[member] = _Pulse(ask, time.monotonic())

    def forget(self, members: Collection[Member]) -> None:
        """Stop asking these actors for heartbeats."""
        with self._lock:
            for member in members:
                self._pulses.pop(member, None)

    def close(self) -> None:
        """End the thread, and wait some seconds for its end."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def check_daemons(self) -> None:
        """Report each process of Ray that has ended, or has been stopped for `stopped_s`."""
        now_s = time.monotonic()
        for daemon in self.daemons:
            look = process_state(daemon.pid)
            if look is None:
                self._lose(daemon, f"{daemon.name} (pid {daemon.pid}) died")
            elif not look.stopped:
                self._daemon_stops.pop(daemon, None)
            elif now_s - self._daemon_stops.setdefault(daemon, now_s) >= self.limits.stopped_s:
                self._lose(daemon, f"{daemon.name} (pid {daemon.pid}) is stopped (SIGSTOP)")

    def _loop(self) -> None:
        """Ask all actors and take their answers, round after round, until `close`."""
        while not self._stop.is_set():
            self.check_daemons()
            with self._lock:
                pulses = dict(self._pulses)
            for member, pulse in pulses.items():
                try:
                    self._ask(member, pulse)
                except Exception:  # noqa: BLE001 - this actor is then silent and gets inspected
                    self._warn(f"{member.name} could not be asked for a heartbeat")
            self._take_answers(pulses)
            self._stop.wait(max(self.limits.pause_s, len(pulses) / BEATS_PER_S))

    def _ask(self, member: Member, pulse: _Pulse) -> None:
        """Ask the actor for a heartbeat, unless an earlier question is still unanswered.

        If the actor has been silent for `silent_s`, also inspect its process: at once on this node,
        else by a task on the actor's node, whose result `_take_answers` receives.
        """
        now_s = time.monotonic()
        if now_s - pulse.heard_s > self.limits.silent_s:
            if self.looks.is_here(member):
                assert member.info is not None
                self._see(member, pulse, process_state(member.info.pid))
            elif pulse.looking is None:
                if pulse.unseen_since_s is None:
                    pulse.unseen_since_s = now_s
                pulse.looking = self.looks.look(member)
        if pulse.asked is None:
            pulse.asked = pulse.ask()

    def _take_answers(self, pulses: dict[Member, _Pulse]) -> None:
        """Process the heartbeats and the inspections that have arrived."""
        beats = {p.asked: (m, p) for m, p in pulses.items() if p.asked is not None}
        views = {p.looking: (m, p) for m, p in pulses.items() if p.looking is not None}
        refs = [*beats, *views]
        try:
            ready = self.looks.ready(refs, self.limits.pause_s / 2) if refs else []
        except Exception:  # noqa: BLE001 - the next round tries again
            self._warn("heartbeats could not be waited for")
            return
        for ref, (member, pulse) in beats.items():
            if ref in ready:
                pulse.asked = None
                with suppress(ray.exceptions.RayError):  # dead; its watch call reports that
                    self._hear(member, pulse, self.looks.get(ref))
        for ref, (member, pulse) in views.items():
            if ref in ready and pulse.looking is ref:
                pulse.looking = None
                with suppress(ray.exceptions.RayError):  # node lost; the watch call reports that
                    self._see(member, pulse, self.looks.get(ref))
        for member, pulse in pulses.items():
            self._miss(member, pulse)

    def _hear(self, member: Member, pulse: _Pulse, stopped: Sequence[str]) -> None:
        """Process an answer; report the actor if a process below it is stopped for `stopped_s`.

        Args:
            stopped: names of the stopped processes below the actor.
        """
        now_s = pulse.heard_s = time.monotonic()
        pulse.cpu_s = -1.0  # the next silence is measured anew
        pulse.looking = pulse.unseen_since_s = None
        if not stopped:
            pulse.stopped_since_s = None
        elif pulse.stopped_since_s is None:
            pulse.stopped_since_s = now_s
        elif now_s - pulse.stopped_since_s >= self.limits.stopped_s:
            self._lose(member, f"{', '.join(stopped)} of {member.name} is stopped (SIGSTOP)")

    def _see(self, member: Member, pulse: _Pulse, look: ProcessState | None) -> None:
        """Process the result of an inspection; report the actor if it is stopped or hangs."""
        now_s = time.monotonic()
        pulse.unseen_since_s = None
        if look is None:  # ended; the watch call of the actor reports that
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
        """Report a silent actor about which its node has reported nothing for `hung_s`."""
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
        """Report an actor or a process of Ray as dead, unless that is known; not after `close`."""
        if member.death is None and not self._stop.is_set():
            if isinstance(member, Member):
                member.lingers = True
            self.watchdog.give_up(member, reason)

    def _warn(self, what: str) -> None:
        """Log a warning with the current exception, unless `close` has been called."""
        if not self._stop.is_set():
            LOGGER.warning("%s", what, exc_info=True)


def _place(member: Member) -> str:
    """Return name, process and node of an actor, for messages."""
    assert member.info is not None, "only actors that have answered are asked"
    return f"{member.name} (pid {member.info.pid}, node {member.info.address})"
