"""Simulation of large agentic runs, in virtual time: real episodes, fleet and scheduler; scripted
engines and environments.

A turn takes the engine a second, and the environment a second in the median, log-normal: 1 % of the
answers take 60 times as long or longer. Ten episodes make a task.

The first table plays the episodes of a step, all at once:

* `s per step`: virtual time until the last one has ended.
* `of the bound`: lowest time that any scheduler can take, also one that knows all latencies,
  divided by this time. The longest episode needs its time, and all turns go through the engines.
* `same replica`: share of the turns that the replica of the turn before wrote.
* `us of CPU per turn`: CPU time of this process, scripts included, in microseconds.
* `resident MB`: largest resident memory of this process so far.

With `--training` a second table trains, too. `lockstep` plays all turns in step, and trains then;
`share` is the part of its time that it plays. The trainer takes the same time in all rows. Each for
itself, episodes wait for their own environment only; `staleness` is `rollout.max_staleness`.

    python benchmarks/simulate_agents_scale.py [--rows 1x10x10,64x10000x10] [--capacity 64]
    python benchmarks/simulate_agents_scale.py --rows "" --training [--tasks 32] [--steps 8]
"""

from __future__ import annotations

import argparse
import logging
import math
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.agents import Latency, Setting, bound_s, lockstep_s, play, train
from roll.platform.collector import calm_collector

ROWS = (
    "1x10x10,1x100x50,1x1000x1,1x1000x10,8x1000x50,64x10000x1,64x10000x10,4096x10x50,"
    "4096x10000x10,4096x100000x1,4096x100000x10"
)
EPISODES = 10
SIGMA = math.log(60) / NormalDist().inv_cdf(0.99)
TAIL = Latency(SIGMA, mean_s=math.exp(SIGMA**2 / 2))
"""Latency with a median of a second, of which 1 % is above a minute."""
SPREAD = Latency(1.0)
"""Latency of the other tables: a mean of a second, and a spread of 1."""


def scale_row(replicas: int, episodes: int, turns: int, capacity: int) -> list[str]:
    """Return a row of the first table."""
    setting = Setting(episodes // EPISODES, EPISODES, turns, replicas, TAIL, capacity)
    played = play(setting, seed=0)
    books = played.books
    return [
        *(f"{replicas:,}", f"{episodes:,}", f"{turns}", f"{played.step_s:,.0f}"),
        f"{bound_s(setting, books) / played.step_s:.3f}",
        f"{books.kept / books.turns:.2f}",
        f"{1e6 * played.cpu_s / books.turns:.0f}",
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
    ]


def training_rows(setting: Setting, share: float, steps: int) -> Iterator[list[str]]:
    """Yield the rows of the second table for one latency and one share."""
    played_s = fmean(lockstep_s(setting, 0, step) for step in range(steps))
    train_s = played_s * (1 - share) / share
    whole_s = played_s + train_s
    spread = "1 % at 60 medians" if setting.latency is TAIL else f"sigma {SPREAD.sigma:g}"
    head = [spread, f"{100 * share:.0f} %"]
    yield [*head, "lockstep", f"{whole_s:.0f}", "1.0"]
    for spare in (0, 1):
        for staleness in (0, 1, 2):
            way = replace(setting, spare=spare)
            step_s = train(way, 0, staleness=staleness, train_s=train_s, steps=steps)
            name = f"staleness {staleness}" + (", 1 spare" if spare else "")
            yield [*head, name, f"{step_s:.0f}", f"{whole_s / step_s:.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--rows", default=ROWS, help="replicas x episodes x turns of each row")
    add("--capacity", type=int, default=64, help="turns that a replica writes at the same time")
    add("--training", action="store_true", help="simulate training, too")
    add("--tasks", type=int, default=32, help="tasks of a step of training, with 8 episodes each")
    add("--turns", type=int, default=10, help="turns of these episodes")
    add("--steps", type=int, default=8, help="steps of training")
    args = parser.parse_args(arguments)
    calm_collector()
    logging.getLogger("roll").setLevel(logging.ERROR)
    if args.rows:
        print("| replicas | episodes | turns | s per step | of the bound | same replica ", end="")
        print("| us of CPU per turn | resident MB |\n|" + "---:|" * 8)
    for row in filter(None, args.rows.split(",")):
        replicas, episodes, turns = map(int, row.split("x"))
        print(f"| {' | '.join(scale_row(replicas, episodes, turns, args.capacity))} |", flush=True)
    if args.training:
        print("| latency | share | | s per step | times faster |\n|---|---:|---|---:|---:|")
        for latency in (SPREAD, TAIL):
            for share in (0.7, 0.9):
                setting = Setting(args.tasks, 8, args.turns, 4, latency)
                for cells in training_rows(setting, share, args.steps):
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
