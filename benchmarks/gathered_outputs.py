"""Speed of an engine of vLLM whose outputs wait in its core for those of later steps.

One engine, as a run starts it, answers the same requests with outputs that wait
(roll/strategy/vllm/outputs/gathered.py) and with a message for each step, each in a process of its
own, in turns. The table has the median time of a round, and the CPU time of all processes in it.

    python benchmarks/gathered_outputs.py [--requests 64] [--tokens 128] [--rounds 12] [--turns 3]
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import spent_s, two_cores
from benchmarks.vs_trl import CASES, make_model
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.strategy import VllmConfig
from roll.core.types import GenerateRequest, SamplingParams, WorkerSpec
from roll.platform.machine import cores
from roll.platform.processes import descendants
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.vllm.engine import VllmEngine
from roll.strategy.vllm.outputs.gathered import GATHERS

SKIP = 2
"""Number of rounds at the start that are not counted."""


def cpu_s() -> float:
    """Return the CPU time of this process and those below it so far, in seconds."""
    return sum(map(spent_s, (os.getpid(), *descendants(os.getpid()))))


async def measure(model: str, requests: int, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """Return wall and CPU time of each round, in seconds."""
    spec = WorkerSpec(Role.ACTOR_INFER, 0, 1, (0,), cores(), 0, "127.0.0.1:1", 0, "cpu")
    setup = EngineSetup(
        spec=spec, model=ModelConfig(path=model), dtype="float32", max_model_len=tokens + 8
    )
    engine = VllmEngine(VllmConfig(max_num_seqs=requests), setup)
    await engine.start()
    sampling = SamplingParams(temperature=1.0, max_new_tokens=tokens, ignore_eos=True)
    taken = []
    for turn in range(rounds):
        begin, used = time.perf_counter(), cpu_s()
        await asyncio.gather(
            *(
                engine.generate(
                    GenerateRequest(f"{turn}-{i}", (turn + 2, *range(3, 10)), sampling, 1, seed=i)
                )
                for i in range(requests)
            )
        )
        taken.append((time.perf_counter() - begin, cpu_s() - used))
    await engine.close()
    return taken[SKIP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of a response")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    numbers = (args.requests, args.tokens, args.rounds)
    if args.one:
        print(json.dumps(asyncio.run(measure(args.one, *numbers))))
        return
    two_cores()
    taken: dict[str, list[tuple[float, float]]] = {"0": [], "1": []}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", CASES["fixed"])
        for _ in range(args.turns):
            for value, found in taken.items():
                command = [sys.executable, __file__, "--one", str(model)]
                for name, number in zip(("requests", "tokens", "rounds"), numbers, strict=True):
                    command += [f"--{name}", str(number)]
                env = os.environ | {GATHERS: value, "OMP_NUM_THREADS": "2"}
                told = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
                found += json.loads(told.stdout.splitlines()[-1])
    print("| outputs | s of a round | CPU s |\n|---|---:|---:|")
    for name, value in (("of each step", "0"), ("that wait", "1")):
        wall, cpu = (statistics.median(column) for column in zip(*taken[value], strict=True))
        print(f"| {name} | {wall:.3f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
