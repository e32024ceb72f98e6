"""`Health`: notices replicas that died, hang or crawl, and brings new ones in their place.

One task per replica asks for a heartbeat, waits for it, and judges. One more per lost replica
revives it. A replica is not asked while it loads weights or its devices are lent: both may take
long, and whoever caused it has a time limit of its own.

A replica crawls when its work, writing and prefill, would have taken a usual replica a small part
of the time that it took (`pace.py`), several times in a row. The time in which it has no requests
or loads weights does not count. After weights, a return or requests from elsewhere it is given
more time, because compiling and caches may then cost what nobody reports; but not without end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roll.config.sections.rollout import HealthConfig
from roll.core.errors import EngineError
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.pace import Pace, Usual, Work
from roll.rollout.fleet.replica import Replica

logger = logging.getLogger(__name__)

SLOW_TIMES = 5
"""Slow measurements in a row that make a replica slow; one takes at least a heartbeat."""
SLOW_TIMES_DISTURBED = 30
"""The same where new weights, a return or a request from elsewhere came in between."""
MAX_BEATS_PER_S = 100
"""Of the whole fleet: a heartbeat costs the driver about a millisecond."""


@dataclass(slots=True)
class _Measured:
    """Of one replica."""

    until: Work
    """What had been measured by the last time."""
    slow: int = 0
    """Slow measurements in a row, up to now."""
    disturbances: int = 0
    """Its number of them at the last measurement."""
    calm: int = 0
    """The same, one measurement before the slow ones began."""


@dataclass
class Health:
    """Watches the replicas of a fleet between `start` and `close`."""

    fleet: Fleet
    limits: HealthConfig
    restart: Callable[[Replica], Awaitable[None]]
    """Puts a new engine in the place of a lost one. Has time limits of its own: a restart that was
    left alone would go on, and meet the next one."""
    rejoin: Callable[[Replica], Awaitable[None]]
    """Brings it the present weights, and lets it serve (`renewed`, `mend`, `Fleet.join`); has time
    limits of its own."""
    retire: Callable[[Replica], Awaitable[None]] | None = None
    """Frees what is left of a replica that is given up, its devices above all."""
    _restarts: dict[int, int] = field(default_factory=dict, init=False)
    _reviving: dict[int, str] = field(default_factory=dict, init=False)
    """Replicas under revival, and why each was lost the last time."""
    _given_up: set[int] = field(default_factory=set, init=False)
    _pace: Pace = field(default_factory=Pace, init=False)
    _measured: dict[int, _Measured] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def start(self) -> None:
        """Begin to watch; to be called on the fleet's loop."""
        self.fleet.on_lost = self._lost
        for replica in self.fleet.replicas:
            self._spawn(self._watch(replica), f"heartbeat of replica {replica.index}")

    @property
    def pause_s(self) -> float:
        """Between two heartbeats of a replica; longer than asked for where the fleet would give
        more than `MAX_BEATS_PER_S`."""
        return max(self.limits.heartbeat_s, len(self.fleet.replicas) / MAX_BEATS_PER_S)

    async def close(self) -> None:
        """Stop watching; a revival under way is broken off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for these tasks, so an error would end the watch in silence."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s ended: %s", task.get_name(), error, exc_info=error)
            failure = EngineError(f"{task.get_name()} ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fleet.fail(failure)

    async def _watch(self, replica: Replica) -> None:
        # Spread over the pause, so that the driver does not hear of all of them at once.
        await asyncio.sleep(self.pause_s * replica.index / len(self.fleet.replicas))
        while True:
            await asyncio.sleep(self.pause_s)
            if replica.serving and not replica.loading:
                beat = await replica.listen(self.limits.timeout_s)
                if beat is not None and not replica.gone:
                    self._measure(replica)

    def _measure(self, replica: Replica) -> None:
        """Compare what it did since the last time with what is usual."""
        done = replica.work
        measured = self._measured.get(replica.index)
        if measured is None:
            count = replica.disturbances
            self._measured[replica.index] = _Measured(done, disturbances=count, calm=count)
            return
        work = done - measured.until
        usual = self._pace.usual(asyncio.get_running_loop().time(), self.pause_s)
        if not usual.allows(work):
            return
        measured.until = done
        self._pace.note(replica.index, work, usual)
        if usual.known and usual.share(work) < self.limits.slow_factor:
            measured.slow += 1
        else:
            measured.slow, measured.calm = 0, measured.disturbances
        measured.disturbances = replica.disturbances
        disturbed = measured.disturbances != measured.calm
        if measured.slow >= (SLOW_TIMES_DISTURBED if disturbed else SLOW_TIMES):
            replica.lose(_too_slow(work, usual, measured.slow))

    def _lost(self, replica: Replica, reason: str) -> None:
        self._pace.forget(replica.index)
        self._measured.pop(replica.index, None)
        logger.warning(
            "inference replica %d is lost, its requests go to the others: %s (%s)",
            replica.index,
            reason,
            replica.vitals.told(asyncio.get_running_loop().time()),
        )
        under_way = replica.index in self._reviving
        self._reviving[replica.index] = reason
        if not under_way:  # else `_revive` sees that it is gone again
            self._spawn(self._revive(replica), f"revival of replica {replica.index}")

    async def _revive(self, replica: Replica) -> None:
        """Restart it until it serves, or too often."""
        index = replica.index
        try:
            while True:
                restarts = self._restarts[index] = self._restarts.get(index, 0) + 1
                if restarts > self.limits.max_restarts:
                    last = self._reviving[index]
                    why = f"was lost {restarts} times, the last time because {last}"
                    self._give_up(replica, why)
                    return
                if await self._bring_back(replica):
                    return
        finally:
            del self._reviving[index]

    async def _bring_back(self, replica: Replica) -> bool:
        """One restart; whether the replica serves."""
        begun = asyncio.get_running_loop().time()
        try:
            await self.restart(replica)
            await self.rejoin(replica)
        except Exception as error:  # noqa: BLE001 - of an engine; counted, and told
            why = f"could not be restarted: {type(error).__name__}: {error}"
            logger.error("inference replica %d %s", replica.index, why)
            self._reviving[replica.index] = f"it {why}"
            replica.lose(f"it {why}")  # it may have got so far as to load weights
        if replica.gone:
            return False
        took_s = asyncio.get_running_loop().time() - begun
        logger.warning("inference replica %d is back after %.1f s", replica.index, took_s)
        return True

    def _give_up(self, replica: Replica, why: str) -> None:
        """Go on without it, as long as any other is left."""
        logger.error("inference replica %d %s; the run goes on without it", replica.index, why)
        if self.retire is not None:
            self._spawn(self._retire(replica), f"end of replica {replica.index}")
        self._given_up.add(replica.index)
        if len(self._given_up) == len(self.fleet.replicas):
            self.fleet.fail(
                EngineError(f"no inference replica is left: replica {replica.index} {why}")
            )

    async def _retire(self, replica: Replica) -> None:
        assert self.retire is not None
        try:
            await self.retire(replica)
        except Exception as error:  # noqa: BLE001 - the run goes on without it in any case
            logger.error("inference replica %d keeps its devices: %s", replica.index, error)


def _too_slow(work: Work, usual: Usual, times: int) -> str:
    return (
        f"{times} times in a row its work took far longer than it takes the others, the last time "
        f"{work.busy_s:.3g} s instead of {work.busy_s * usual.share(work):.2g} s: it wrote "
        f"{work.written_tokens} tokens, {work.written_tokens / work.sequence_s:.3g}/s for each "
        f"sequence where {usual.each:.3g}/s are usual, and prefilled {work.prefilled_tokens}"
    )
