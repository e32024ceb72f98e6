"""Simulation of rollouts at any scale: real scheduler, router and buffer with scripted engines.

For each number of replicas the script calibrates a trainer (or takes that of `--train`), and then
runs synchronous steps and asynchronous steps with each staleness, in virtual time. It checks that
every sample is complete and not too old. A token of the scripted engines stands for 16 real tokens.

Columns of the table:

* `step s`: virtual seconds per step.
* `speedup`: throughput relative to synchronous steps.
* `of the oracle`: the shortest time that a scheduler could take if it knew all lengths, divided by
  the time of the run.
* `written`: tokens written, divided by the tokens that the engines could have written.
* `busy slots`: mean share of the engines' slots that held a sequence.
* `mean age`: mean staleness of the trained tokens, in steps.
* `lost`: replicas lost. `moved`: requests that were moved to another replica.
* `in flight`: largest number of groups that were begun but not yet trained on.
* `us/request`: CPU time of the driver per request, in microseconds, without the scripted engines
  and the trainer. `of it GC`: the part of it that Python's garbage collector took.
* `CPU s/step`: the same per step, in seconds.
* `resident MB`: resident memory of the process.

    python benchmarks/simulate_rollout.py [--replicas 1,64,4096] [--staleness 0,1,2,4]
        [--lengths lognormal|pareto|fixed] [--failures 3600] [--slow 0.05] [--picture FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.engine import EngineModel
from benchmarks.simulation.faults import Faults
from benchmarks.simulation.lengths import Fixed, Lengths, LogNormal, Pareto
from benchmarks.simulation.report import draw, markdown, table
from benchmarks.simulation.study import study
from benchmarks.simulation.world import Scenario
from roll.config.sections.rollout import HealthConfig
from roll.platform.collector import calm_collector

ROOT = Path(__file__).parents[1]


def scenario(args: argparse.Namespace, replicas: int) -> Scenario:
    kinds: dict[str, Lengths] = {
        "lognormal": LogNormal(args.median, args.sigma),
        "pareto": Pareto(args.median, args.alpha),
        "fixed": Fixed(args.median),
    }
    return Scenario(
        replicas,
        kinds[args.lengths],
        train_s=args.train or 0.0,
        steps=args.steps,
        prompts_per_step=max(1, replicas * args.samples_per_replica // args.samples_per_prompt),
        samples_per_prompt=args.samples_per_prompt,
        max_new_tokens=args.max_tokens,
        separate_siblings=args.siblings == "separate",
        queue=args.queue,
        model=replace(EngineModel(), knee=args.knee, pause_s=args.push),
        limits=limits(args),
        faults=Faults(
            mean_between_s=args.failures, slow_share=args.slow, slow_factor=args.slow_factor
        ),
        seed=args.seed,
    )


def limits(args: argparse.Namespace) -> HealthConfig:
    """Return the default health settings; with `--failures`, allow any number of restarts."""
    config = HealthConfig(heartbeat_s=args.heartbeat)
    return config.model_copy(update={"max_restarts": 10**6}) if isfinite(args.failures) else config


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--replicas", default="64", help="comma-separated")
    add("--staleness", default="0,1,2,4", help="comma-separated")
    add("--steps", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--samples-per-replica", type=int, default=64, help="in a step")
    add("--samples-per-prompt", type=int, default=8)
    add("--siblings", choices=("together", "separate"), default="together")
    add("--queue", type=int, default=64, help="sequences sent to a replica that wait there")
    add("--knee", type=int, default=64, help="sequences of a replica that do not slow each other")
    add("--heartbeat", type=float, default=HealthConfig().heartbeat_s, help="seconds between two")
    add("--push", type=float, default=EngineModel().pause_s, help="seconds that new weights take")
    add("--generation-share", type=float, default=0.7, help="of a synchronous step")
    add("--train", type=float, help="seconds of training, in place of --generation-share")
    add("--lengths", choices=("lognormal", "pareto", "fixed"), default="lognormal")
    add("--median", type=float, default=64, help="tokens")
    add("--sigma", type=float, default=1.0, help="of lognormal")
    add("--alpha", type=float, default=1.5, help="of pareto")
    add("--max-tokens", type=int, default=1024, help="longer responses are cut off")
    add("--failures", type=float, default=float("inf"), help="seconds between two of a replica")
    add("--slow", type=float, default=0.0, help="share of replicas that are slow")
    add("--slow-factor", type=float, default=4.0)
    add("--table", type=Path, help="file for the table, in Markdown")
    add("--picture", type=Path, help="file for the picture")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args, console = parse(arguments), Console(width=170)
    rows = []
    for replicas in map(int, args.replicas.split(",")):
        ages = [int(steps) for steps in args.staleness.split(",")]
        share = args.generation_share if args.train is None else None
        for row in study(scenario(args, replicas), ages, share):
            rows.append(row)
            console.print(f"{len(rows)}: {replicas} replicas, {row.outcome.step_s:.1f} s a step")
    console.print(table(rows))
    if args.table:
        args.table.write_text(markdown(rows))
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    calm_collector()  # as in the driver of a real run
    main()
