"""`Watchdog`: notices that a worker died, whoever is waited for and whether or not it was asked.

Each actor has one call that never returns. A thread of the driver waits for all of these calls:
when one ends, its actor is dead. The thread then notes the death on the actor's `Member`, and
cancels the guarded asyncio futures that it concerns, whose waiters ask `check` why: those of the
actor itself where it can be replaced, all of them where the run cannot do without it. A process
that is stopped, and does not die, is noticed by `Heartbeats`, and counts as dead from then on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from roll.distributed.heartbeats import BeatLimits, Heartbeats
from roll.distributed.on_ray.members import Daemon, Member

LAST_LINES = 30
POLL_S = 0.5


class Watchdog:
    """Shared by all clusters of a run. Loops: one thread, waiting on all watch calls at once."""

    def __init__(self, daemons: Sequence[Daemon] = (), limits: BeatLimits | None = None) -> None:
        """
        Args:
            daemons: without which nothing works.
        """
        self._members: dict[Any, Member] = {}
        self._guarded: dict[asyncio.Future[Any], Member] = {}
        self._lock = threading.Lock()
        self._fatal: Member | Daemon | None = None
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="roll-watchdog", daemon=True)
        self._beats = Heartbeats(self, daemons, limits or BeatLimits())
        self._thread.start()

    def watch(self, ref: Any, member: Member, ask: Callable[[], Any]) -> None:
        """`ref` is the never-ending call of the actor `member`; `ask` asks it for a heartbeat."""
        with self._lock:
            self._members[ref] = member
        self._changed.set()
        self._beats.add(member, ask)

    def forget(self, members: Iterable[Member]) -> None:
        """These actors are about to end on purpose."""
        gone = set(members)
        with self._lock:
            self._members = {ref: each for ref, each in self._members.items() if each not in gone}
        self._beats.forget(gone)

    def give_up(self, member: Member | Daemon, reason: str) -> None:
        """Count it as dead from now on, whatever it still does."""
        if isinstance(member, Member):
            self.forget([member])
        self._record(member, reason)

    @property
    def ended(self) -> bool:
        """Whether a worker died that the run cannot do without."""
        return self._fatal is not None

    @property
    def ray_ended(self) -> bool:
        """Whether a process of Ray died, without which it answers nothing."""
        return isinstance(self._fatal, Daemon)

    def check(self, members: Iterable[Member] = (), *, grace_s: float = 0.0) -> None:
        """Raise the death that concerns whoever waits for `members`, if there is one.

        Args:
            grace_s: how long a death may take to become known.

        Raises:
            WorkerError: a worker died that the run cannot do without.
            WorkerLostError: one of `members` died.
        """
        concerned = list(members)
        deadline = time.monotonic() + grace_s
        while (dead := self._dead(concerned)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead is not None:
            raise dead.error(dead.death or "")

    async def settled(self, members: Iterable[Member], grace_s: float) -> None:
        """Return when a death is known that concerns whoever waits for `members`, or after
        `grace_s`: what `check` does with threads, for many waiters at once."""
        concerned = list(members)
        deadline = time.monotonic() + grace_s
        while self._dead(concerned) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def guard(self, future: asyncio.Future[Any], member: Member) -> None:
        """Cancel `future`, an answer of `member`, on a death; its loop must be running."""
        self._guarded[future] = member
        if self._dead([member]) is not None:
            future.cancel()

    def release(self, future: asyncio.Future[Any]) -> None:
        self._guarded.pop(future, None)

    def close(self) -> None:
        """Stop the thread; deaths are no longer noticed."""
        self._beats.close()
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout=5)

    def _dead(self, members: Iterable[Member]) -> Member | Daemon | None:
        if self._fatal is not None:
            return self._fatal
        return next((member for member in members if member.death is not None), None)

    def _loop(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                refs = list(self._members)
            if not refs:
                self._changed.wait()
                self._changed.clear()
                continue
            ready, _ = ray.wait(refs, num_returns=1, timeout=POLL_S, fetch_local=False)
            for ref in ready:
                with self._lock:
                    member = self._members.pop(ref, None)
                if member is not None:
                    self._beats.check_daemons()  # whose end takes actors with it
                    self._record(member, describe_death(member, ref))

    def _record(self, member: Member | Daemon, reason: str) -> None:
        if member.death is None:
            member.death = reason
        if not member.replaceable and self._fatal is None:
            self._fatal = member
        for future, awaited in list(self._guarded.items()):
            if member.replaceable and awaited is not member:
                continue
            # The loop may close between the look and the call; then nobody waits.
            with suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(future.cancel)


def describe_death(member: Member, ref: Any) -> str:
    """What to say of an ended watch call: who, where, why as far as Ray knows, and last words."""
    try:
        ray.get(ref, timeout=5)
        reason = "its watch call returned"
    except ray.exceptions.RayError as error:
        reason = _ray_reason(str(error))
    assert member.info is not None, "only actors that have answered are watched"
    info = member.info
    message = f"{member.name} died (pid {info.pid}, node {info.address}): {reason}"
    last = last_lines(Path(info.log))
    if last:
        message += f"\nlast lines of its log {info.log}:\n{last}"
    elif info.log:
        message += f"\nits log was {info.log} on that node"
    return message


def _ray_reason(text: str) -> str:
    """The line of Ray's long text that says what happened."""
    for line in text.splitlines():
        if "Worker exit detail:" in line:
            detail = line.partition("Worker exit detail:")[2].strip()
            return detail.partition(" Some common causes")[0]
    return text.splitlines()[-1].strip() if text.strip() else "unknown reason"


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The end of a log file; empty when it is on another node or holds nothing."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16_384))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    # Ray writes markers for its log reader into the same file.
    kept = [
        line for line in lines if not line.startswith((":job_id:", ":actor_name:", ":task_name:"))
    ]
    return "\n".join(f"  {line}" for line in kept[-count:])
