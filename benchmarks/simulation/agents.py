"""Agents in virtual time: real episodes, fleet and scheduler; scripted engines and environments."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import NormalDist

from benchmarks.simulation.clock import run_virtually
from benchmarks.simulation.lengths import uniform
from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.errors import EnvironmentFailedError
from roll.core.types import GenerateRequest, Heartbeat, Prompt, SamplingParams
from roll.data.datasets import Dataset, Source
from roll.data.mixing import Sampler
from roll.envs.observed import Observed
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.budget import Budget
from roll.rollout.episodes.episodes import Episodes
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import Sticky
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.types import Group, GroupTask

ENGINE_S = 1.0
"""Time of a turn in the engine, in seconds."""
HANG_S = 300.0
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Latency:
    """Times of environments for their answers, in seconds: log-normal."""

    sigma: float
    """Spread of the logarithm."""
    hangs: float = 0.0
    """Share of the episodes that hang in one of their turns."""
    mean_s: float = 1.0

    def draw(self, seed: int, episode: str, turn: int, turns: int) -> float:
        """Return the time of one answer, the same for the same arguments.

        Args:
            seed: seed of the step.
            episode: name of the episode.
            turn: number of the turn, from 1 on.
            turns: number of turns of an episode.
        """
        name = zlib.crc32(f"{seed}/{episode}".encode())
        if uniform(name) < self.hangs and 1 + name % turns == turn:
            return HANG_S
        normal = _NORMAL.inv_cdf(uniform((name << 16) + turn))
        return self.mean_s * math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclass(frozen=True)
class Setting:
    """What is played in a step, and where."""

    tasks: int
    episodes: int
    """Number of episodes of a task that are used."""
    turns: int
    replicas: int
    latency: Latency
    capacity: int = 0
    """Number of turns that a replica writes at the same time; 0 for all episodes of a step."""
    spare: int = 0
    """Number of episodes of a task beyond `episodes`; those that end first are used."""
    limit_s: float = math.inf
    """Time limit of an environment; an episode whose environment takes longer begins again."""

    @property
    def room(self) -> int:
        """Number of turns that a replica writes at the same time."""
        return self.capacity or self.tasks * (self.episodes + self.spare)


@dataclass
class Books:
    """Record of what engines and environments did."""

    turns: int = 0
    kept: int = 0
    """Number of turns on the replica of the turn before, which has their prefix."""
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time of its environment, of each episode, in seconds."""
    home: dict[str, int] = field(default_factory=dict)
    """Replica of the last turn, of each episode."""


@dataclass
class Engine:
    """Engine which takes a second for each turn."""

    index: int
    books: Books

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        episode = request.id.rpartition(".")[0]
        self.books.kept += self.books.home.get(episode, self.index) == self.index
        self.books.home[episode] = self.index
        await asyncio.sleep(ENGINE_S)
        return [Completion.of((7, 1), (0.0, 0.0), VersionRuns(((0, 2),)), FinishReason.STOP)]

    async def abort(self, request_id: str) -> None: ...

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 0, 0, {})


@dataclass
class Environments:
    """Scripted environments. A call that takes longer than the limit fails after this time."""

    setting: Setting
    seed: int
    config: EnvironmentConfig
    books: Books
    name: str = "scripted"
    _turn: dict[str, int] = field(default_factory=dict)

    async def open(self, episode: str, seed: int, prompt: Prompt) -> Observed:
        self._turn[episode] = 0
        return Observed(array("i", [5]), "")

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        self._turn[episode] += 1
        self.books.turns += 1
        turn, limit_s = self._turn[episode], self.setting.limit_s
        wait_s = self.setting.latency.draw(self.seed, episode, turn, self.setting.turns)
        self.books.waited_s[episode] += wait_s
        await asyncio.sleep(min(wait_s, limit_s))
        if wait_s > limit_s:
            raise EnvironmentFailedError("it hangs")
        return Observed(array("i", [6]), "", terminated=turn == self.setting.turns)

    def close(self, episode: str) -> None:
        self._turn.pop(episode, None)


def players(setting: Setting, seed: int, books: Books) -> Episodes:
    """Return what plays the episodes of a task, inside a virtual loop."""
    config = EnvironmentConfig(env="scripted", max_turns=setting.turns, max_tries=50)
    engines = [Engine(index, books) for index in range(setting.replicas)]
    return Episodes(
        fleet=Fleet([Replica(each.index, each, setting.room) for each in engines], Sticky()),
        decode=lambda tokens: "",
        hosts={"": Environments(setting, seed, config, books)},
        failed=FailedEpisodes({"scripted": 1.0}),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8),
        tag_sampling={},
        max_tokens=100 * setting.turns,
        samples_per_prompt=setting.episodes,
        seed=seed,
        request_timeout_s=1e9,
        redundant=setting.spare,
    )


def tasks(count: int) -> list[Prompt]:
    """Return tasks, which differ in their names."""
    return [Prompt(f"t:{index}", (), "", "", "") for index in range(count)]


def _check(setting: Setting, groups: list[Group]) -> None:
    """Raise AssertionError unless each task has all its episodes, with all their turns."""
    assert len(groups) == setting.tasks
    for group in groups:
        assert len(group.samples) == setting.episodes
        assert all(len(one.turns) == setting.turns for one in group.samples)


@dataclass(frozen=True)
class Played:
    """Results of a step."""

    step_s: float
    """Virtual time, in seconds."""
    books: Books
    cpu_s: float
    """CPU time of this process, scripts included, in seconds."""


def play(setting: Setting, seed: int) -> Played:
    """Play all tasks at once; return the time of the slowest."""

    async def step() -> Played:
        books, cpu_s = Books(), time.process_time()
        episodes, loop = players(setting, seed, books), asyncio.get_running_loop()
        each = [episodes.run(GroupTask(one, 0)) for one in tasks(setting.tasks)]
        groups = await all_or_first_error(each)
        cpu_s = time.process_time() - cpu_s
        _check(setting, groups)
        return Played(loop.time(), books, cpu_s)

    return run_virtually(step())


def train(setting: Setting, seed: int, *, staleness: int, train_s: float, steps: int) -> float:
    """Return the mean virtual time of a step of training, in seconds.

    Args:
        setting: episodes of a step.
        seed: seed of all steps.
        staleness: see `Budget.max_staleness`; 0 for steps that play first and train then.
        train_s: time that the trainer takes for a step, in seconds.
        steps: number of steps, from the first episode to the end of the last training.
    """

    async def run() -> float:
        episodes, loop = players(setting, seed, Books()), asyncio.get_running_loop()
        source = Source("t", 1.0, tuple(tasks(setting.tasks)))
        budget = Budget(setting.tasks, staleness, max_in_flight=1_000_000)
        sampler = Sampler(Dataset((source,), (), "scripted"), seed=seed)
        scheduler = GenerateScheduler(sampler, episodes.run, budget)
        for step in range(steps):
            _check(setting, (await scheduler.collect(step)).groups)
            await asyncio.sleep(train_s)
        ended_s = loop.time()
        await scheduler.close()
        return ended_s / steps

    return run_virtually(run())


def lockstep_s(setting: Setting, seed: int, step: int = 0) -> float:
    """Return the time of a step in which every turn waits for the slowest environment."""
    return sum(
        ENGINE_S
        + max(
            setting.latency.draw(seed, f"{step}/t:{task}/{number}", turn, setting.turns)
            for task in range(setting.tasks)
            for number in range(setting.episodes)
        )
        for turn in range(1, setting.turns + 1)
    )


def bound_s(setting: Setting, books: Books) -> float:
    """Return a time below which no scheduler can play a step without spare episodes: each episode
    takes its own time, and all turns go through the engines."""
    slots = setting.replicas * setting.room
    work_s = math.ceil(setting.tasks * setting.episodes * setting.turns / slots) * ENGINE_S
    return max(work_s, setting.turns * ENGINE_S + max(books.waited_s.values()))
