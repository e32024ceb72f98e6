"""`Watchdog`: notices the death of any worker, even of one that nobody is waiting for.

Each actor has one call that never returns. A thread of the driver waits for all these calls: when
one ends, its actor is dead. The thread then records the death in the actor's `Member` and cancels
guarded asyncio futures; those who wait for these futures call `check` for the reason. If the actor
is replaceable, the futures of this actor are cancelled, otherwise all futures. `Heartbeats` notices
processes that are stopped but not dead; they count as dead from then on.
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

from roll.core.errors import RollError
from roll.distributed.heartbeats import BeatLimits, Heartbeats
from roll.distributed.on_ray.members import Daemon, Member

LAST_LINES = 30
POLL_S = 0.5


class Watchdog:
    """A thread that waits for the watch calls of all actors of a run; all clusters share it."""

    def __init__(self, daemons: Sequence[Daemon] = (), limits: BeatLimits | None = None) -> None:
        """Start the thread, and the thread of `Heartbeats`.

        Args:
            daemons: processes of Ray without which the run cannot continue.
            limits: time limits of `Heartbeats`.
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
        """Begin to watch an actor.

        Args:
            ref: reference to the actor's call that never returns.
            ask: function that asks the actor for a heartbeat; see `Heartbeats.add`.
        """
        with self._lock:
            self._members[ref] = member
        self._changed.set()
        self._beats.add(member, ask)

    def watch_call(self, ref: Any, member: Member) -> None:
        """Watch a further call of an actor that returns only when it can do its work no more.

        Args:
            ref: reference to the call; its error is the reason of the death.
        """
        with self._lock:
            self._members[ref] = member
        self._changed.set()

    def forget(self, members: Iterable[Member]) -> None:
        """Stop watching these actors, because they are about to be ended on purpose."""
        gone = set(members)
        with self._lock:
            self._members = {ref: each for ref, each in self._members.items() if each not in gone}
        self._beats.forget(gone)

    def give_up(self, member: Member | Daemon, reason: str) -> None:
        """Treat an actor or a process of Ray as dead from now on, even if it still runs. Waits that
        its death affects end with an error that gives `reason`."""
        if isinstance(member, Member):
            self.forget(member.parts)
        self._record(member, reason)

    @property
    def ended(self) -> bool:
        """True once a worker that is not replaceable, or a process of Ray, has died: the run cannot
        continue."""
        return self._fatal is not None

    @property
    def ray_ended(self) -> bool:
        """True if the first fatal death was that of a process of Ray. Ray then answers no calls."""
        return isinstance(self._fatal, Daemon)

    def check(self, members: Iterable[Member] = (), *, grace_s: float = 0.0) -> None:
        """Raise an error if a death is known that affects a wait for `members`.

        Args:
            members: the actors whose answers are awaited.
            grace_s: time to wait for such a death to become known, in seconds.

        Raises:
            WorkerError: a worker that is not replaceable, or a process of Ray, died.
            WorkerLostError: one of `members` died; it is replaceable.
        """
        concerned = list(members)
        deadline = time.monotonic() + grace_s
        while (dead := self._dead(concerned)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead is not None:
            raise dead.error(dead.death or "")

    async def settled(self, members: Iterable[Member], grace_s: float) -> None:
        """Wait at most `grace_s` seconds until a death is known that affects a wait for `members`.

        `check` waits by blocking its thread; this method lets other coroutines run.
        """
        concerned = list(members)
        deadline = time.monotonic() + grace_s
        while self._dead(concerned) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def guard(self, future: asyncio.Future[Any], member: Member) -> None:
        """Cancel `future`, the answer of `member`, as soon as a death is known that affects it. The
        event loop of the future must be running."""
        self._guarded[future] = member
        if self._dead([member]) is not None:
            future.cancel()

    def release(self, future: asyncio.Future[Any]) -> None:
        """End what `guard` began: do not cancel `future` any more."""
        self._guarded.pop(future, None)

    def close(self) -> None:
        """End the threads, and wait some seconds for their ends. The actors run on, unwatched."""
        self._beats.close()
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout=5)

    def _dead(self, members: Iterable[Member]) -> Member | Daemon | None:
        """Return the actor or process whose death ends a wait for `members`, if there is one."""
        if self._fatal is not None:
            return self._fatal
        return next((member for member in members if member.death is not None), None)

    def _loop(self) -> None:
        """Record each actor whose watch call ends as dead, until `close`."""
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
                    self._beats.check_daemons()  # if Ray itself died, that is the better message
                    self._record(member, describe_death(member, ref))

    def _record(self, member: Member | Daemon, reason: str) -> None:
        """Record a death, and cancel the guarded futures that it affects. Of a worker on several
        nodes, all parts are lost with the one that died."""
        parts = member.parts if isinstance(member, Member) else []
        for each in (member, *parts):
            if each.death is None:
                each.death = reason
        if not member.replaceable and self._fatal is None:
            self._fatal = member
        for future, awaited in list(self._guarded.items()):
            if member.replaceable and awaited not in parts:
                continue
            # The event loop may have been closed; then nothing waits for the future.
            with suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(future.cancel)
        for other in parts[1:]:  # they would wait for the dead part, and keep their devices
            if other.kill is not None:
                other.kill()


def describe_death(member: Member, ref: Any) -> str:
    """Return a message about a dead actor: its name, process and node, the reason that Ray gives,
    and the last lines of its log.

    Args:
        ref: reference to the watch call, which has ended.
    """
    try:
        ray.get(ref, timeout=5)
        reason = "its watch call returned"
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)  # of a call that `watch_call` watches
        reason = str(cause) if isinstance(cause, RollError) else _ray_reason(str(error))
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
    """Return the reason for a death, taken from Ray's long error text."""
    for line in text.splitlines():
        if "Worker exit detail:" in line:
            detail = line.partition("Worker exit detail:")[2].strip()
            return detail.partition(" Some common causes")[0]
    return text.splitlines()[-1].strip() if text.strip() else "unknown reason"


def last_lines(log: Path) -> str:
    """Return the last `LAST_LINES` lines of a log file, indented; empty if it is not here, or
    cannot be read."""
    try:
        if not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:  # of another user, or removed; the death must be told all the same
        return ""
    # Leave out the markers that Ray writes into the file for its log reader.
    kept = [
        line for line in lines if not line.startswith((":job_id:", ":actor_name:", ":task_name:"))
    ]
    return "\n".join(f"  {line}" for line in kept[-LAST_LINES:])
