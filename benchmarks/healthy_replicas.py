"""Test of the default health settings: healthy replicas must stay, sick ones must be found soon.

The real scheduler, fleet and health checks run in virtual time, as in `simulate_rollout.py`. The
staleness is two steps, so that every push of weights drops KV caches, which are then computed
again. The engines decode 64 tokens per second in each of up to 64 sequences, and prefill 16,000
tokens per second.

The runs of the first table have no faults, so no replica may be lost. In each run of the second
table, one replica gets sick during the first step; the table shows after how many seconds the
replica was given up. The second table uses only the first values of `--replicas` and `--pushes`.

    python benchmarks/healthy_replicas.py [--replicas 16,64,4096] [--medians 1000,4000,16000]
        [--pushes 0.5,5,20] [--steps 3] [--capacity 64] [--no-sick]
        [--table FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.engine import EngineModel
from benchmarks.simulation.faults import Sickness
from benchmarks.simulation.lengths import LogNormal
from benchmarks.simulation.world import Outcome, Scenario, simulate
from roll.platform.collector import calm_collector

MEDIAN = 32
"""Median length of a response in scripted tokens. It is the same for all real medians, so that the
memory of the simulation does not depend on them."""
LONGEST = 8
"""Largest length of a response, as a multiple of the median."""
SICK = (
    ("dead", Sickness("crash")),
    ("hung", Sickness("hang")),
    ("20 times slower", Sickness("slow", 20)),
    ("100 times slower", Sickness("slow", 100)),
)


def scenario(replicas: int, median: int, push_s: float, *, steps: int, capacity: int) -> Scenario:
    """Return a simulated run with default settings.

    Args:
        median: median length of a response, in real tokens.
        push_s: time for which a push of weights stops an engine, in virtual seconds.
        steps: number of training steps.
        capacity: number of sequences that a replica decodes at the same time.
    """
    scale = median / MEDIAN
    real = EngineModel()
    return Scenario(
        replicas,
        LogNormal(MEDIAN),
        staleness=2,
        train_s=0.3 * median / (real.tokens_per_s * 16),
        steps=steps,
        prompts_per_step=max(1, replicas * capacity // 8),
        max_new_tokens=LONGEST * MEDIAN,
        queue=0,
        model=replace(
            real,
            capacity=capacity,
            knee=capacity,
            tokens_per_s=real.tokens_per_s * 16 / scale,
            prefill_tokens_per_s=real.prefill_tokens_per_s * 16 / scale,
            pause_s=push_s,
        ),
    )


def healthy(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the first table, whose runs have no faults."""
    for replicas in args.replicas:
        for median in args.medians:
            for push_s in args.pushes:
                one = scenario(replicas, median, push_s, steps=args.steps, capacity=args.capacity)
                begun_s = time.monotonic()
                outcome = simulate(one)
                yield (
                    f"{replicas}",
                    f"{median}",
                    f"{push_s:g}",
                    f"{outcome.step_s:.0f}",
                    f"{outcome.lost_replicas}",
                    f"{outcome.moved_requests}",
                    f"{time.monotonic() - begun_s:.0f}",
                )


def sick(args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the second table; in each of its runs one replica gets sick."""
    replicas, push_s = args.replicas[0], args.pushes[0]
    for median in args.medians:
        one = scenario(replicas, median, push_s, steps=args.steps, capacity=args.capacity)
        for name, sickness in SICK:
            at_s = 0.5 * median / 64
            outcome = simulate(replace(one, sickness=replace(sickness, replica=1, at_s=at_s)))
            yield f"{replicas}", f"{median}", name, found_after(outcome), f"{outcome.lost_replicas}"


def found_after(outcome: Outcome) -> str:
    """Return the seconds from the beginning of the fault to the loss of its replica, as text;
    `never` if the replica was not lost."""
    sickness = outcome.scenario.sickness
    assert sickness is not None
    moments = [at_s for at_s, index in outcome.losses if index == sickness.replica]
    return f"{moments[0] - sickness.at_s:.0f}" if moments else "never"


def table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    """Return the table in Markdown; also print each line as soon as it is known."""
    lines: list[str] = []
    for cells in chain((tuple(head), ("---:",) * len(head)), rows):
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument

    def numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
        return lambda text: [kind(one) for one in text.split(",")]

    add("--replicas", type=numbers(int), default=[16, 64], help="comma-separated")
    add("--medians", type=numbers(int), default=[1000, 4000, 16000], help="tokens")
    add("--pushes", type=numbers(float), default=[0.5, 5, 20], help="seconds")
    add("--steps", type=int, default=3)
    add("--capacity", type=int, default=64, help="sequences that a replica decodes at once")
    add("--no-sick", action="store_true", help="the first table only")
    add("--table", type=Path, help="file for the tables, in Markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    head = ("replicas", "median tokens", "push s", "step s", "lost", "moved", "real s")
    text = table(head, healthy(args))
    if not args.no_sick:
        print()
        text += "\n" + table(
            ("replicas", "median tokens", "one replica is", "given up after s", "lost"), sick(args)
        )
    if args.table:
        args.table.write_text(text)


if __name__ == "__main__":
    calm_collector()  # as in the driver of a real run
    main()
