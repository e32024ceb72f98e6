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
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.agents import Latency, Setting, lockstep_s, play
from roll.platform.collector import calm_collector

LIMIT_S = 20.0


def rows(setting: Setting, seeds: int) -> Iterator[list[str]]:
    """Yield a row of the table for each way to play."""
    slowest = fmean(lockstep_s(setting, seed) for seed in range(seeds))
    latency = setting.latency
    head = [f"{latency.sigma:g}", f"{100 * latency.hangs:g} %"]
    yield [*head, "lockstep", f"{slowest:.0f}", "1.0", ""]
    ways = {
        "each for itself": setting,
        "1 spare": replace(setting, spare=1),
        "2 spare": replace(setting, spare=2),
    }
    if latency.hangs:
        limited = replace(setting, limit_s=LIMIT_S)
        ways[f"limit of {LIMIT_S:g} s"] = limited
        ways[f"limit of {LIMIT_S:g} s, 1 spare"] = replace(limited, spare=1)
    for name, way in ways.items():
        played = [play(way, seed) for seed in range(seeds)]
        turns = sum(each.books.turns for each in played)
        cpu_us = 1e6 * sum(each.cpu_s for each in played) / turns
        mean_s = fmean(each.step_s for each in played)
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
