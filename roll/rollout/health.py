"""`Health`: notices replicas that died, hang or crawl, and brings new ones in their place.

One task per replica asks for a heartbeat, waits for it, and judges. One more per lost replica
revives it. A replica is not asked while it loads weights or its devices are lent: both may take
long, and whoever caused it has a time limit of its own.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from roll.config.rollout import HealthConfig
from roll.core.errors import EngineError
from roll.rollout.fleet import Fleet
from roll.rollout.replica import Replica

logger = logging.getLogger(__name__)

SLOW_BEATS = 5
"""Slow heartbeats in a row that make a replica slow."""
MAX_BEATS_PER_S = 100
"""Of the whole fleet: a heartbeat costs the driver about a millisecond."""
ENOUGH_OTHERS = 2
"""Busy replicas that a slow one is compared with; with fewer nobody knows who is the slow one."""


@dataclass
class Health:
    """Watches the replicas of a fleet between `start` and `close`."""

    fleet: Fleet
    limits: HealthConfig
    restart: Callable[[Replica], Awaitable[None]]
    """Puts a new engine in the place of a lost one."""
    rejoin: Callable[[Replica], Awaitable[None]]
    """Brings it the present weights and lets it serve; has time limits of its own."""
    retire: Callable[[Replica], Awaitable[None]] | None = None
    """Frees what is left of a replica that is given up, its devices above all."""
    _restarts: dict[int, int] = field(default_factory=dict, init=False)
    _rates: dict[int, float] = field(default_factory=dict, init=False)
    """Tokens per second and sequence of the busy replicas, at their last heartbeat."""
    _usual: float = field(default=0.0, init=False)
    _usual_until_s: float = field(default=0.0, init=False)
    _slow: dict[int, int] = field(default_factory=dict, init=False)
    """Slow heartbeats in a row."""
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
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, replica: Replica) -> None:
        # Spread over the pause, so that the driver does not hear of all of them at once.
        await asyncio.sleep(self.pause_s * replica.index / len(self.fleet.replicas))
        while True:
            await asyncio.sleep(self.pause_s)
            if replica.serving and not replica.loading:
                await self._listen(replica)

    async def _listen(self, replica: Replica) -> None:
        """One heartbeat, and how fast the replica was since the one before."""
        clock = asyncio.get_running_loop().time
        before, since = replica.written_tokens, replica.last_heartbeat_s
        busy = replica.in_flight_sequences
        beat = await replica.listen(self.limits.timeout_s)
        if beat is None:
            return
        sequences = min(busy, replica.in_flight_sequences, replica.capacity)
        if since is None or not sequences:
            self._rates.pop(replica.index, None)
            return
        elapsed_s = max(clock() - since, 1e-9)
        self._judge(replica, (beat.written_tokens - before) / elapsed_s / sequences)

    def _judge(self, replica: Replica, rate: float) -> None:
        self._rates[replica.index] = rate
        usual = self._usual_rate()
        slow = len(self._rates) > ENOUGH_OTHERS and rate < self.limits.slow_factor * usual
        count = self._slow[replica.index] = self._slow.get(replica.index, 0) + 1 if slow else 0
        if count >= SLOW_BEATS:
            replica.lose(
                f"it writes {rate:.3g} tokens/s for each sequence, the median is {usual:.3g}"
            )

    def _usual_rate(self) -> float:
        """The median, worked out once between two heartbeats: a thousand replicas must not sort a
        thousand rates each."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._usual_until_s:
            self._usual = statistics.median(self._rates.values())
            self._usual_until_s = now_s + self.pause_s
        return self._usual

    def _lost(self, replica: Replica, reason: str) -> None:
        self._rates.pop(replica.index, None)
        self._slow.pop(replica.index, None)
        logger.warning(
            "inference replica %d is lost, its requests go to the others: %s (%s)",
            replica.index,
            reason,
            replica.heard(),
        )
        self._renew(replica, reason)

    def _renew(self, replica: Replica, reason: str) -> None:
        restarts = self._restarts[replica.index] = self._restarts.get(replica.index, 0) + 1
        if restarts > self.limits.max_restarts:
            self._give_up(replica, f"was lost {restarts} times, the last time because {reason}")
        else:
            self._spawn(self._revive(replica), f"revival of replica {replica.index}")

    async def _revive(self, replica: Replica) -> None:
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.limits.restart_timeout_s):
                await self.restart(replica)
            await self.rejoin(replica)
        except Exception as error:  # noqa: BLE001 - the end of a background task, told to the fleet
            why = f"could not be restarted: {type(error).__name__}: {error}"
            logger.error("inference replica %d %s", replica.index, why)
            if replica.gone:
                self._renew(replica, f"it {why}")
            else:  # it got so far as to load weights
                replica.lose(f"it {why}")
            return
        took_s = asyncio.get_running_loop().time() - begun
        logger.warning("inference replica %d is back after %.1f s", replica.index, took_s)

    def _give_up(self, replica: Replica, why: str) -> None:
        """Go on without it, as long as any other is left."""
        logger.error("inference replica %d %s; the run goes on without it", replica.index, why)
        if self.retire is not None:
            self._spawn(self.retire(replica), f"end of replica {replica.index}")
        if all(one.gone for one in self.fleet.replicas):
            self.fleet.fail(
                EngineError(f"no inference replica is left: replica {replica.index} {why}")
            )
