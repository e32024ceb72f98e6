"""Workers that host the environments of a run, and the tasks of episodes among them."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from roll.config.agentic_base import AgenticBase
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.roles import Role
from roll.core.errors import EnvironmentFailedError, HostSpentError, RollError, WorkerLostError
from roll.core.types import Prompt
from roll.data.tasks import options_of
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.envs.observed import Observed
from roll.rollout.rpc_batching import BatchedCalls
from roll.runtime.run_data import RunData
from roll.workers.environment import EnvWorker

logger = logging.getLogger(__name__)

MAX_RESTARTS = 100
"""Largest number of restarts of one worker in a run: an environment that kills its worker each
time is broken. A worker that was sound before does not count."""
SOUND_CALLS = 100
"""Number of answers after which a worker counts as sound."""
SILENT_S = 300.0
"""Time beyond the limit of one call in which a worker must answer anything, in seconds."""
LOOKS = 10
"""Number of looks at a worker in the time in which it must answer."""


@dataclass(eq=False)
class ClusterHosts:
    """Hosts of one environment: the workers of a cluster, which take episodes in turn. All calls
    come from one event loop. A worker that dies is replaced; its episodes fail, and begin
    again elsewhere."""

    name: str
    config: EnvironmentConfig
    cluster: Cluster[EnvWorker]
    silent_s: float = SILENT_S
    """Time beyond the limit of one call after which a worker that answers nothing is ended."""
    _room: asyncio.Semaphore | None = field(init=False)
    """Limit of `max_episodes`; None if there is none."""
    _inside: set[str] = field(default_factory=set, init=False)
    """Episodes that count for it: from before they begin to the end of their environment."""
    _places: dict[str, int] = field(default_factory=dict, init=False)
    """Rank of the worker of each running episode."""
    _ends: list[BatchedCalls[str, None]] = field(init=False)
    _restarts: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _restarted: Counter[int] = field(default_factory=Counter, init=False)
    """Number of restarts of each worker that count for `MAX_RESTARTS`."""
    _answered: Counter[int] = field(default_factory=Counter, init=False)
    """Number of answers of each worker since its start."""
    _background: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _under_way: Counter[int] = field(default_factory=Counter, init=False)
    """Number of calls of each worker that are under way."""
    _watches: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """Watch over each worker, by rank; one that has ended is followed by another at the next
    call."""

    def __post_init__(self) -> None:
        most = self.config.max_episodes
        self._room = None if most is None else asyncio.Semaphore(most)
        self._turn = cycle(range(self.cluster.world_size))
        self._ends = [BatchedCalls(self._end_on(rank)) for rank in range(self.cluster.world_size)]

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        """Begin an episode on the next worker that lives, once there is room; see `Hosts.open`."""
        if self._room is not None:
            await self._room.acquire()
            self._inside.add(episode)
        rank = await self._living()
        self._places[episode] = rank
        options = options_of(prompt)
        return await self._answer(
            rank, self.cluster.ask(rank, EnvWorker.open, episode, seed, options)
        )

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        """Give a turn to the worker of the episode; see `Hosts.act`."""
        rank = self._places[episode]
        return await self._answer(
            rank, self.cluster.ask(rank, EnvWorker.act, episode, action, last, wrote)
        )

    def close(self, episode: str) -> None:
        """End an episode without waiting for it; ignore one that does not run or whose worker
        died."""
        rank = self._places.pop(episode, None)
        if rank is not None and rank not in self.cluster.lost:
            self._later(self._end(rank, episode))
        else:
            self._leave(episode)

    async def _answer(self, rank: int, answer: Awaitable[Observed]) -> Observed:
        """Wait for a worker; turn its death into a failure of the episode, and replace it.

        The time limits are in the worker: only there is it known when a call begins, since calls
        wait for room. A worker that is stopped counts as dead (`distributed/heartbeats.py`), and
        one whose limits cannot fire is ended by `_watch`.
        """
        try:
            with self._watched(rank):
                observed = await answer
            self._answered[rank] += 1
            return observed
        except HostSpentError:
            logger.warning("environment %s: worker %d: too many calls hang there", self.name, rank)
            self._replace(rank, lives=True)
            raise
        except WorkerLostError as error:
            self._replace(rank)
            raise EnvironmentFailedError(
                f"environment {self.name!r}: its worker died: {error}"
            ) from None

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        """Watch over a worker during a call."""
        self._under_way[rank] += 1
        watch = self._watches.get(rank)
        if watch is None or watch.done():
            self._watches[rank] = asyncio.ensure_future(self._watch(rank))
        try:
            yield
        finally:
            self._under_way[rank] -= 1

    async def _watch(self, rank: int) -> None:
        """End a worker whose event loop does not run while calls of it are under way: code that
        keeps Python's interpreter lock for good also keeps the worker's time limits from firing. A
        worker that is merely busy answers `answer`, which waits for no room."""
        limit_s = max(self.config.reset_timeout_s, self.config.step_timeout_s) + self.silent_s
        while self._under_way[rank] and rank not in self.cluster.lost:
            answer = asyncio.ensure_future(self.cluster.ask(rank, EnvWorker.answer))
            # In parts: a time in which this process did not run is not the worker's.
            for _ in range(LOOKS):
                await asyncio.wait({answer}, timeout=limit_s / LOOKS)
            if answer.done():
                if answer.exception() is not None:  # it died; the calls themselves tell
                    return
                await asyncio.sleep(limit_s / LOOKS)
                continue
            logger.warning(
                "environment %s: worker %d has answered nothing for %g s and is ended: its code "
                "computes without letting any other code run (a regular expression, a huge number)",
                *(self.name, rank, limit_s),
            )
            try:
                await asyncio.to_thread(self.cluster.end, rank)
            except RollError as error:
                logger.warning("environment %s: worker %d: %s", self.name, rank, error)
            answer.cancel()
            return

    async def _living(self) -> int:
        """Return the rank of the next worker that lives; wait for one if none does.
        EnvironmentFailedError if none lives and one has died too often."""
        while True:
            for _ in range(self.cluster.world_size):
                rank = next(self._turn)
                if rank not in self.cluster.lost and rank not in self._restarts:
                    return rank
            for rank in range(self.cluster.world_size):
                self._replace(rank)
            await asyncio.wait(self._restarts.values(), return_when=asyncio.FIRST_COMPLETED)

    def _replace(self, rank: int, *, lives: bool = False) -> None:
        """Start another worker in place of a lost one, unless that is under way;
        EnvironmentFailedError after `MAX_RESTARTS`.

        Args:
            lives: replace it even if it lives. Its other calls then fail as after its death.
        """
        if rank in self._restarts or not (lives or rank in self.cluster.lost):
            return
        self._restarted[rank] += self._answered.pop(rank, 0) < SOUND_CALLS
        if self._restarted[rank] > MAX_RESTARTS:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: worker {rank} died {MAX_RESTARTS + 1} times "
                f"before it had given {SOUND_CALLS} answers"
            )
        task = asyncio.ensure_future(self._restart(rank))
        self._restarts[rank] = task
        task.add_done_callback(lambda _: self._restarts.pop(rank))

    async def _restart(self, rank: int) -> None:
        """Start another worker of this rank and its environments. A failure is only logged, and the
        worker then counts as dead: without `start` it has no environments."""
        logger.warning("environment %s: worker %d is replaced", self.name, rank)
        try:
            await asyncio.to_thread(self.cluster.restart, rank)
            async with asyncio.timeout(self.cluster.call_timeout_s):
                await self.cluster.ask(rank, EnvWorker.start)
        except (RollError, TimeoutError) as error:
            why = str(error) or f"it did not start within {self.cluster.call_timeout_s:g} s"
            logger.warning("environment %s: worker %d: %s", self.name, rank, why)
            with suppress(RollError):  # it is given up, even if its process does not end
                await asyncio.to_thread(self.cluster.end, rank)

    async def _end(self, rank: int, episode: str) -> None:
        """End an episode in its worker; a failure is only logged."""
        try:
            with self._watched(rank):
                await self._ends[rank].ask([episode])
        except RollError as error:
            logger.debug("environment %s: episode %s: %s", self.name, episode, error)
        finally:
            self._leave(episode)

    def _leave(self, episode: str) -> None:
        """Give the place of an episode to the next one that waits; ignore one without a place."""
        if episode in self._inside:
            assert self._room is not None
            self._inside.remove(episode)
            self._room.release()

    def _end_on(self, rank: int) -> Callable[[list[str]], Awaitable[list[None]]]:
        """Return the function that ends several episodes of one worker in one call."""

        async def end(episodes: list[str]) -> list[None]:
            await self.cluster.ask(rank, EnvWorker.end, episodes)
            return [None] * len(episodes)

        return end

    def _later(self, work: Any) -> None:
        """Run a coroutine as a task that nobody waits for."""
        task = asyncio.ensure_future(work)
        self._background.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._background.discard)


def start_environments(
    config: AgenticBase, launcher: Launcher, data: RunData[Prompt]
) -> dict[str, ClusterHosts]:
    """Start the workers of all environments; return the hosts by tag.

    Raises:
        ConfigError: an environment does not exist, or does not take its arguments.
    """
    by_tag: dict[str, ClusterHosts] = {}
    for name, environment in config.environments.items():
        place = Placement(
            Role.ENVIRONMENT,
            pool=environment.pool or config.actor_infer.pool,
            workers=environment.workers,
            seed=config.seed,
            label=name,
            replaceable=True,
        )
        cluster = launcher.start(
            EnvWorker,
            place,
            name,
            environment,
            config.train_model,
            config.data,
            data.rendered_at.isoformat(),
        )
        cluster.call(EnvWorker.start)
        hosts = ClusterHosts(name, environment, cluster)
        by_tag |= dict.fromkeys(environment.tags, hosts)
    return by_tag
