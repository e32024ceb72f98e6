"""Simulation of agents with slow environments, in virtual time: real episodes and fleet, scripted
engines and environments.

A step plays tasks with several episodes each. A turn takes the engine a second, and the environment
a second in the mean, log-normal; a share of the episodes hangs for 300 s in one of its turns. The
script compares:

* `lockstep`: all episodes take their turns at the same time, and each turn waits for the slowest.
* `each for itself`: this framework; an episode waits for its own environment only.
* `1 spare`, `2 spare`: the same with `rollout.redundant_samples`; the episodes of a task that end
  first are used.
* `limit`: the first with `step_timeout_s: 20`; an episode whose environment hangs begins again.

Columns: virtual seconds of a step, mean over the seeds; how many times faster than lockstep; and,
for this framework, CPU time per turn of this process, in microseconds, scripts included.

    python benchmarks/simulate_agents.py [--tasks 32] [--episodes 8] [--turns 10] [--replicas 4]
        [--seeds 10] [--sigma 1.0,1.5] [--hangs 0,0.005]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.clock import run_virtually
from benchmarks.simulation.lengths import uniform
from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.errors import EnvironmentFailedError
from roll.core.types import GenerateRequest, Heartbeat, Prompt, SamplingParams
from roll.envs.host import Observed
from roll.platform.collector import calm_collector
from roll.rollout.async_utils import all_or_first_error
from roll.rollout.episodes.episodes import Episodes
from roll.rollout.episodes.failed import FailedEpisodes
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.types import GroupTask

ENGINE_S = 1.0
HANG_S = 300.0
LIMIT_S = 20.0
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Latency:
    """Times of environments for their answers, in seconds: log-normal with mean 1."""

    sigma: float
    hangs: float
    """Share of the episodes that hang in one of their turns."""

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
        return math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclass(frozen=True)
class Setting:
    """What is played in a step."""

    tasks: int
    episodes: int
    turns: int
    replicas: int
    latency: Latency


class Engine:
    """Engine with room for all, which takes a second for each turn."""

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(ENGINE_S)
        return [Completion.of((7, 1), (0.0, 0.0), VersionRuns(((0, 2),)), FinishReason.STOP)]

    async def abort(self, request_id: str) -> None: ...

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat(0, 0, 0, {})


@dataclass
class Environments:
    """Scripted environments. A call that takes longer than `limit_s` fails after this time."""

    setting: Setting
    seed: int
    limit_s: float
    config: EnvironmentConfig
    name: str = "scripted"
    answers: int = 0
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
        self.answers += 1
        turn = self._turn[episode]
        wait_s = self.setting.latency.draw(self.seed, episode, turn, self.setting.turns)
        await asyncio.sleep(min(wait_s, self.limit_s))
        if wait_s > self.limit_s:
            raise EnvironmentFailedError("it hangs")
        return Observed(array("i", [6]), "", terminated=turn == self.setting.turns)

    def close(self, episode: str) -> None:
        self._turn.pop(episode, None)


async def _step(setting: Setting, seed: int, spare: int, limit_s: float) -> tuple[float, int]:
    """Play a step; return its virtual seconds and the number of turns that were played."""
    config = EnvironmentConfig(env="scripted", max_turns=setting.turns, max_tries=50)
    hosts = Environments(setting, seed, limit_s, config)
    room = setting.tasks * (setting.episodes + spare)
    episodes = Episodes(
        fleet=Fleet([Replica(i, Engine(), room) for i in range(setting.replicas)]),
        decode=lambda tokens: "",
        hosts={"": hosts},
        failed=FailedEpisodes({"scripted": 1.0}),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8),
        tag_sampling={},
        max_tokens=100 * setting.turns,
        samples_per_prompt=setting.episodes,
        seed=seed,
        request_timeout_s=10 * HANG_S,
        redundant=spare,
    )
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    prompts = [Prompt(f"t:{i}", (), "", "", "") for i in range(setting.tasks)]
    groups = await all_or_first_error([episodes.run(GroupTask(one, 0)) for one in prompts])
    for group in groups:
        assert len(group.samples) == setting.episodes
        assert all(len(one.turns) == setting.turns for one in group.samples)
    return loop.time() - begun_s, hosts.answers


def lockstep_s(setting: Setting, seed: int) -> float:
    """Return the time of a step in which every turn waits for the slowest environment."""
    return sum(
        ENGINE_S
        + max(
            setting.latency.draw(seed, f"0/t:{task}/{number}", turn, setting.turns)
            for task in range(setting.tasks)
            for number in range(setting.episodes)
        )
        for turn in range(1, setting.turns + 1)
    )


def rows(setting: Setting, seeds: int) -> Iterator[list[str]]:
    """Yield a row of the table for each way to play."""
    slowest = fmean(lockstep_s(setting, seed) for seed in range(seeds))
    latency = setting.latency
    head = [f"{latency.sigma:g}", f"{100 * latency.hangs:g} %"]
    yield [*head, "lockstep", f"{slowest:.0f}", "1.0", ""]
    ways = [("each for itself", 0, math.inf), ("1 spare", 1, math.inf), ("2 spare", 2, math.inf)]
    if latency.hangs:
        ways.append((f"limit of {LIMIT_S:g} s", 0, LIMIT_S))
        ways.append((f"limit of {LIMIT_S:g} s, 1 spare", 1, LIMIT_S))
    for name, spare, limit_s in ways:
        took, turns, cpu_s = [], 0, time.process_time()
        for seed in range(seeds):
            step_s, answers = run_virtually(_step(setting, seed, spare, limit_s))
            took.append(step_s)
            turns += answers
        cpu_us = 1e6 * (time.process_time() - cpu_s) / turns
        mean_s = fmean(took)
        yield [*head, name, f"{mean_s:.0f}", f"{slowest / mean_s:.1f}", f"{cpu_us:.0f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--tasks", type=int, default=32, help="tasks of a step")
    add("--episodes", type=int, default=8, help="episodes of a task")
    add("--turns", type=int, default=10, help="turns of an episode")
    add("--replicas", type=int, default=4)
    add("--seeds", type=int, default=10, help="steps whose times are averaged")
    add("--sigma", default="1.0,1.5", help="spreads of the logarithm of the latency")
    add("--hangs", default="0,0.005", help="shares of episodes that hang for 300 s")
    args = parser.parse_args(arguments)
    calm_collector()
    logging.getLogger("roll").setLevel(logging.ERROR)  # of episodes that begin again
    print("| sigma | hangs | | s per step | times faster | us of CPU per turn |")
    print("|---:|---:|---|---:|---:|---:|")
    for sigma in map(float, args.sigma.split(",")):
        for hangs in map(float, args.hangs.split(",")):
            latency = Latency(sigma, hangs)
            setting = Setting(args.tasks, args.episodes, args.turns, args.replicas, latency)
            for row in rows(setting, args.seeds):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
