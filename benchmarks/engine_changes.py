"""Speed, memory and start of an engine of vLLM without a GPU, with and without a change.

An engine, as a run starts it, answers the same requests both ways, each in a process of its own, in
turns. The changes:

- `gathered`: outputs wait in vLLM's core for those of later steps
  (roll/strategy/vllm/outputs/gathered.py), in place of a message for each step;
- `compiled`: `enforce_eager: false`, in place of layers that run as they are. Compiled code of
  earlier starts is in its cache;
- `two`: two engines of one core, in place of one engine of two. Both have compiled layers.

The table has the median time of a round, the CPU time and the largest memory of all processes in
it, and the median time of a start; two engines start one after the other here.

    python benchmarks/engine_changes.py compiled|gathered|two [--case fixed|50M] [--requests 64]
                                            [--tokens 128] [--rounds 12] [--turns 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import pss_mb, spent_s, two_cores
from benchmarks.vs_trl import CASES, make_model
from roll.config.sections.engines import VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.types import GenerateRequest, SamplingParams, WorkerSpec
from roll.distributed.device_layout import share_cores
from roll.platform.machine import cores
from roll.platform.processes import descendants
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.vllm.engine import VllmEngine
from roll.strategy.vllm.outputs.gathered import GATHERS

SKIP = 2
"""Number of rounds at the start that are not counted."""


@dataclass(frozen=True)
class Way:
    """One of the two ways of a change."""

    name: str
    environment: dict[str, str]
    settings: dict[str, Any]
    engines: int = 1
    """Number of engines that share the cores."""


CHANGES = {
    "gathered": (
        Way("outputs of each step", {GATHERS: "0"}, {}),
        Way("outputs that wait", {GATHERS: "1"}, {}),
    ),
    "compiled": (
        Way("layers as they are", {}, {}),
        Way("compiled layers", {}, {"enforce_eager": False}),
    ),
    "two": (
        Way("one engine of two cores", {}, {"enforce_eager": False}),
        Way("two engines of one core", {}, {"enforce_eager": False}, engines=2),
    ),
}


@dataclass(frozen=True)
class Work:
    """What an engine is asked for."""

    model: str
    requests: int
    tokens: int
    rounds: int


def processes() -> list[int]:
    """Return this process and those below it."""
    return [os.getpid(), *descendants(os.getpid())]


async def measure(work: Work, way: Way) -> dict[str, list[float]]:
    """Start the engines, deal out cores and requests among them, and measure them.

    Returns:
        Wall and CPU time of each round, and the time of the start, in seconds; memory behind the
        rounds in MB.
    """
    model = ModelConfig(path=work.model)
    config = VllmConfig(max_num_seqs=work.requests, **way.settings)
    count, engines = way.engines, []
    for rank, own in enumerate(share_cores(cores(), count)):
        spec = WorkerSpec(Role.ACTOR_INFER, rank, count, (rank,), own, 0, "127.0.0.1:1", 0, "cpu")
        setup = EngineSetup(spec=spec, model=model, dtype="float32", max_model_len=work.tokens + 8)
        engines.append(VllmEngine(config, setup))
    begin = time.perf_counter()
    for engine in engines:  # one by one: each writes its cores into this process's environment
        await engine.start()
    found: dict[str, list[float]] = {"start_s": [time.perf_counter() - begin], "s": [], "cpu_s": []}
    sampling = SamplingParams(temperature=1.0, max_new_tokens=work.tokens, ignore_eos=True)
    for turn in range(work.rounds):
        begin, used = time.perf_counter(), sum(map(spent_s, processes()))
        await asyncio.gather(
            *(
                engines[i % count].generate(
                    GenerateRequest(f"{turn}-{i}", (turn + 2, *range(3, 10)), sampling, 1, seed=i)
                )
                for i in range(work.requests)
            )
        )
        if turn >= SKIP:
            found["s"].append(time.perf_counter() - begin)
            found["cpu_s"].append(sum(map(spent_s, processes())) - used)
    found["mb"] = [sum(map(pss_mb, processes()))]
    await asyncio.gather(*(engine.close() for engine in engines))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("change", choices=CHANGES)
    parser.add_argument("--case", choices=("fixed", "50M"), default="fixed", help="of vs_trl.py")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of a response")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    ways = CHANGES[args.change]
    if args.one:
        work = Work(**json.loads(args.one[1]))
        print(json.dumps(asyncio.run(measure(work, ways[int(args.one[0])]))))
        return
    two_cores()
    taken: dict[str, dict[str, list[float]]] = {way.name: {} for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", CASES[args.case])
        work = Work(str(model), args.requests, args.tokens, args.rounds)
        for _ in range(args.turns):
            for number, way in enumerate(ways):
                one = [str(number), json.dumps(asdict(work))]
                told = subprocess.run(
                    [sys.executable, __file__, args.change, "--one", *one],
                    env=os.environ | way.environment | {"OMP_NUM_THREADS": str(2 // way.engines)},
                    check=True,
                    capture_output=True,
                    text=True,
                )
                for name, numbers in json.loads(told.stdout.splitlines()[-1]).items():
                    taken[way.name].setdefault(name, []).extend(numbers)
    print("| | s of a round | CPU s | MB | s of a start |\n|---|---:|---:|---:|---:|")
    for name, found in taken.items():
        wall, cpu, start = (statistics.median(found[key]) for key in ("s", "cpu_s", "start_s"))
        print(f"| {name} | {wall:.3f} | {cpu:.2f} | {max(found['mb']):.0f} | {start:.1f} |")


if __name__ == "__main__":
    main()
