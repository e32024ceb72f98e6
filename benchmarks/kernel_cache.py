"""Benchmark of vLLM's memory and speed on CPUs by the number of kernels that oneDNN keeps.

oneDNN compiles one kernel per shape of a matrix product and keeps the newest of them. The number of
tokens in a batch is part of the shape, so an engine meets new shapes for a long time. For each size
of this cache (`ONEDNN_PRIMITIVE_CACHE_CAPACITY`) the script starts one engine of the quickstart's
model, sends it the same rounds of 16 random prompts, and prints the anonymous memory of vLLM's core
after every tenth of the rounds, and the time of all rounds.

    python benchmarks/kernel_cache.py [--sizes 1024,64] [--rounds 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import psutil

from benchmarks.process_meter import sizes_mb
from roll.config import load_config
from roll.config.rlvr import RlvrConfig
from roll.config.sections.engines import VllmConfig
from roll.config.sections.roles import Role
from roll.core.types import GenerateRequest, SamplingParams, WorkerSpec
from roll.platform.machine import cores
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.vllm.engine import VllmEngine

ROOT = Path(__file__).parents[1]
RUN = "examples/rlvr_quickstart/run.yaml"
VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PROMPTS, DIGITS, NEW_TOKENS = 16, 5, 16
BOS, FIRST_DIGIT, ASK = 2, 4, 3
"""Token ids of the quickstart's tokenizer."""


async def measure(rounds: int) -> None:
    """Run the rounds in an engine of this process; print memory and time."""
    config = load_config(ROOT / RUN).config
    assert isinstance(config, RlvrConfig)
    strategy = config.actor_infer.strategy
    assert isinstance(strategy, VllmConfig)
    spec = WorkerSpec(Role.ACTOR_INFER, 0, 1, (0,), cores(), 0, "127.0.0.1:1", 0, "cpu")
    setup = EngineSetup(
        spec=spec,
        model=config.train_model,
        dtype="float32",
        max_model_len=config.max_sequence_tokens,
    )
    engine = VllmEngine(strategy, setup)
    await engine.start()
    core = next(p.pid for p in psutil.Process().children(recursive=True) if "Engine" in p.name())
    sampling = SamplingParams(**config.sampling.model_dump())
    dice, memory_mb, begin_s = random.Random(0), [], time.monotonic()
    for turn in range(rounds):
        prompts = [
            (BOS, *(dice.randrange(FIRST_DIGIT, FIRST_DIGIT + 10) for _ in range(DIGITS)), ASK)
            for _ in range(PROMPTS)
        ]
        await asyncio.gather(
            *(
                engine.generate(
                    GenerateRequest(f"{turn}-{i}", prompt, sampling, NEW_TOKENS, seed=i)
                )
                for i, prompt in enumerate(prompts)
            )
        )
        if turn % max(1, rounds // 10) == 0:
            memory_mb.append(sizes_mb(core)["Anonymous"])
    wall_s = time.monotonic() - begin_s
    await engine.close()
    print(
        f"| {os.environ[VARIABLE]} | {wall_s:.0f} | {' '.join(f'{mb:.0f}' for mb in memory_mb)} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1024,64", help="kernels kept; an engine for each")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        asyncio.run(measure(args.rounds))
        return
    if not (ROOT / "outputs/quickstart/model").exists():
        subprocess.run([sys.executable, "examples/sorting.py", "quickstart"], cwd=ROOT, check=True)
    print(
        "| kernels kept | s | MB of the core, by tenths of the rounds |\n|---:|---:|---|",
        flush=True,
    )
    for size in args.sizes.split(","):
        subprocess.run(
            [sys.executable, __file__, "--one", "--rounds", str(args.rounds)],
            cwd=ROOT,
            env=os.environ | {VARIABLE: size},
            check=True,
        )


if __name__ == "__main__":
    main()
