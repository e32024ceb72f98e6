"""`Health`: a monitor that detects dead, hanging and slow replicas and restarts their engines.

One task per replica asks for a heartbeat, waits for it, and judges the progress. One more task per
lost replica restarts it. A replica is not asked while it loads weights or its devices are lent:
both may take long, and the caller that started either has a time limit of its own.

A replica counts as slow if a usual replica would have done the same work (writing and prefill) in a
small part of the time, several times in a row (`pace.py`). Time without requests, or in which the
replica loads weights, does not count. After a disturbance (new weights, a return, or requests moved
from another replica) more slow measurements are allowed, because compiling and caches may then cost
time that no heartbeat reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roll.config.sections.rollout import HealthConfig
from roll.core.errors import EngineError
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.pace import FleetSpeeds, Usual, Work
from roll.rollout.fleet.replica import Replica

logger = logging.getLogger(__name__)

SLOW_TIMES = 5
"""Number of slow measurements in a row after which a replica counts as slow. A measurement takes at
least one heartbeat."""
SLOW_TIMES_DISTURBED = 30
"""The same number if new weights, a return or a moved request disturbed the replica meanwhile."""
RETRY_BEATS = 10
"""Pause before the restart that follows a failed one, in heartbeats; it doubles with each failure,
so that what hinders a start for a while (a full disk, a device that is still in use) does not use
up all restarts."""
MAX_BEATS_PER_S = 100
"""Largest number of heartbeats per second of the whole fleet; each one costs the driver about a
millisecond."""


@dataclass(slots=True)
class _Measured:
    """State of the measurements of one replica."""

    until: Work
    """Total work of the replica at the last measurement."""
    slow: int = 0
    """Number of slow measurements in a row, up to the last one."""
    disturbances: int = 0
    """Value of `Replica.disturbances` at the last measurement."""
    calm: int = 0
    """Value of `Replica.disturbances` at the start of the last interval that was not slow. If it
    differs from `disturbances`, a disturbance may explain the slow measurements."""


@dataclass
class Health:
    """Monitor of the replicas of a fleet, active between `start` and `close`."""

    fleet: Fleet
    limits: HealthConfig
    restart: Callable[[Replica], Awaitable[None]]
    """Function that replaces a lost engine by a new one. The function must limit its own time: a
    restart that is only abandoned would continue and collide with the next restart."""
    rejoin: Callable[[Replica], Awaitable[None]]
    """Function that brings the current weights to a restarted replica and puts it back into service
    (`reset_for_new_engine`, `mark_weights_complete`, `Fleet.join`). It must limit its own time."""
    retire: Callable[[Replica], Awaitable[None]] | None = None
    """Function that frees the resources of a replica that is given up, mainly its devices."""
    _restarts: dict[int, int] = field(default_factory=dict, init=False)
    """Number of restarts of each replica, by its index."""
    _reviving: dict[int, str] = field(default_factory=dict, init=False)
    """Reason of the latest loss of each replica that is being restarted, by its index."""
    _given_up: set[int] = field(default_factory=set, init=False)
    _pace: FleetSpeeds = field(default_factory=FleetSpeeds, init=False)
    _measured: dict[int, _Measured] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def start(self) -> None:
        """Start the monitoring tasks; call this method on the event loop of the fleet."""
        self.fleet.on_lost = self._lost
        for replica in self.fleet.replicas:
            self._spawn(self._watch(replica), f"heartbeat of replica {replica.index}")

    @property
    def pause_s(self) -> float:
        """Pause between two heartbeats of a replica, in seconds; longer than `limits.heartbeat_s`
        if the fleet would otherwise send more than `MAX_BEATS_PER_S`."""
        return max(self.limits.heartbeat_s, len(self.fleet.replicas) / MAX_BEATS_PER_S)

    async def close(self) -> None:
        """Stop the monitoring; restarts under way are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None], name: str) -> None:
        """Start a task that `close` stops; if it fails, the fleet fails."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log the error of a task and make the fleet fail.

        No caller waits for these tasks, so their errors would otherwise be lost.
        """
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s ended: %s", task.get_name(), error, exc_info=error)
            failure = EngineError(f"{task.get_name()} ended: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fleet.fail(failure)

    async def _watch(self, replica: Replica) -> None:
        """Ask a replica for heartbeats and measure its pace, for ever; pause while it loads weights
        or does not serve."""
        # Spread over the pause, so that the heartbeats do not all reach the driver at once.
        await asyncio.sleep(self.pause_s * replica.index / len(self.fleet.replicas))
        while True:
            await asyncio.sleep(self.pause_s)
            if replica.serving and not replica.loading:
                beat = await replica.listen(self.limits.timeout_s)
                if beat is not None and not replica.gone:
                    self._measure(replica)

    def _measure(self, replica: Replica) -> None:
        """Compare the work since the last measurement with the usual work; lose a replica that has
        been slow too often in a row."""
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
        """Log the loss of a replica and start to revive it, unless a revival that runs already sees
        the loss."""
        self._pace.forget(replica.index)
        self._measured.pop(replica.index, None)
        others = any(each.serving for each in self.fleet.replicas if each is not replica)
        logger.warning(
            "inference replica %d is lost, its requests %s: %s (%s)",
            replica.index,
            "go to the others" if others else "wait until a replica is back",
            reason,
            replica.vitals.told(asyncio.get_running_loop().time()),
        )
        under_way = replica.index in self._reviving
        self._reviving[replica.index] = reason
        if not under_way:
            self._spawn(self._revive(replica), f"revival of replica {replica.index}")

    async def _revive(self, replica: Replica) -> None:
        """Restart a lost replica until it serves; give up after `limits.max_restarts` restarts."""
        index = replica.index
        pause_s = RETRY_BEATS * self.limits.heartbeat_s
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
                if restarts < self.limits.max_restarts:
                    logger.warning("inference replica %d: next try in %.3g s", index, pause_s)
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
        finally:
            del self._reviving[index]

    async def _bring_back(self, replica: Replica) -> bool:
        """Restart a replica once and return whether it serves afterwards."""
        begun = asyncio.get_running_loop().time()
        try:
            await self.restart(replica)
            await self.rejoin(replica)
        except Exception as error:  # noqa: BLE001 - any engine error; counted and logged
            why = f"could not be restarted: {type(error).__name__}: {error}"
            logger.error("inference replica %d %s", replica.index, why)
            self._reviving[replica.index] = f"it {why}"
            replica.lose(f"it {why}")  # `rejoin` may have failed after it had renewed the replica
        if replica.gone:
            return False
        took_s = asyncio.get_running_loop().time() - begun
        logger.warning("inference replica %d is back after %.1f s", replica.index, took_s)
        return True

    def _give_up(self, replica: Replica, why: str) -> None:
        """Give a replica up for the rest of the run; make the fleet fail if it was the last one."""
        logger.error("inference replica %d %s; the run goes on without it", replica.index, why)
        if self.retire is not None:
            self._spawn(self._retire(replica), f"end of replica {replica.index}")
        self._given_up.add(replica.index)
        if len(self._given_up) == len(self.fleet.replicas):
            self.fleet.fail(
                EngineError(f"no inference replica is left: replica {replica.index} {why}")
            )

    async def _retire(self, replica: Replica) -> None:
        """Free the resources of a replica; an error is only logged."""
        assert self.retire is not None
        try:
            await self.retire(replica)
        except Exception as error:  # noqa: BLE001 - the run goes on without it in any case
            logger.error("inference replica %d keeps its devices: %s", replica.index, error)


def _too_slow(work: Work, usual: Usual, times: int) -> str:
    """Return the reason for the loss of a replica that was slow `times` times in a row."""
    return (
        f"{times} times in a row its work took far longer than it takes the others, the last time "
        f"{work.busy_s:.3g} s instead of {work.busy_s * usual.share(work):.2g} s: it wrote "
        f"{work.written_tokens} tokens, {work.written_tokens / work.sequence_s:.3g}/s for each "
        f"sequence where {usual.each:.3g}/s are usual, and prefilled {work.prefilled_tokens}"
    )
