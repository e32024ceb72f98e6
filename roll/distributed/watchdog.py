"""`Watchdog`: notices that a worker died, whoever is waited for and whether or not it was asked.

Each actor has one call that never returns. A thread of the driver waits for all of these calls:
when one ends, its actor is dead. The thread then stores a `WorkerError`, which `check` raises, and
cancels every guarded asyncio future, whose waiter asks `check` why.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from roll.core.errors import WorkerError

LAST_LINES = 30
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Member:
    """One watched actor, as it is named in an error."""

    name: str
    """Role and rank, like `actor_train[1]`."""
    pid: int
    node: str
    log: str
    """File on its node that holds its standard error."""


class Watchdog:
    """Shared by all clusters of a run. Loops: one thread, waiting on all watch calls at once."""

    def __init__(self) -> None:
        self._members: dict[Any, Member] = {}
        self._guarded: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        self._death: WorkerError | None = None
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="roll-watchdog", daemon=True)
        self._thread.start()

    def watch(self, ref: Any, member: Member) -> None:
        """`ref` is the never-ending call of the actor `member`."""
        with self._lock:
            self._members[ref] = member
        self._changed.set()

    def forget(self, refs: Iterable[Any]) -> None:
        """These actors are about to end on purpose."""
        with self._lock:
            for ref in refs:
                self._members.pop(ref, None)

    @property
    def death(self) -> WorkerError | None:
        """The first death, if any."""
        return self._death

    def check(self, *, grace_s: float = 0.0) -> None:
        """Raise the first death. `grace_s`: how long a death may take to become known.

        Raises:
            WorkerError: a watched worker died.
        """
        deadline = time.monotonic() + grace_s
        while self._death is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._death is not None:
            raise self._death

    def guard(self, future: asyncio.Future[Any]) -> None:
        """Cancel `future` when a worker dies; its loop must be running."""
        self._guarded[future] = future.get_loop()
        if self._death is not None:
            future.cancel()

    def release(self, future: asyncio.Future[Any]) -> None:
        self._guarded.pop(future, None)

    def close(self) -> None:
        """Stop the thread; deaths are no longer noticed."""
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout=5)

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
                    self._record(ref, member)

    def _record(self, ref: Any, member: Member) -> None:
        if self._death is None:
            self._death = describe_death(member, ref)
        for future, loop in list(self._guarded.items()):
            # The loop may have closed between the look and the call; then nobody waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(future.cancel)


def describe_death(member: Member, ref: Any) -> WorkerError:
    """The error for an ended watch call: who, where, why as far as Ray knows, and last words."""
    try:
        ray.get(ref, timeout=5)
        reason = "its watch call returned"
    except ray.exceptions.RayError as error:
        reason = _ray_reason(str(error))
    message = f"{member.name} died (pid {member.pid}, node {member.node}): {reason}"
    last = last_lines(Path(member.log))
    if last:
        message += f"\nlast lines of its log {member.log}:\n{last}"
    elif member.log:
        message += f"\nits log was {member.log} on that node"
    return WorkerError(message)


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
