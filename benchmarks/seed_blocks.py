"""Time that vLLM's sampler without a GPU needs for the seeds of a step, and for the rest.

The seeds are drawn one by one, as vLLM does, and in blocks
(roll/strategy/vllm/worker_side/seeds.py); medians in microseconds of a step.

    python benchmarks/seed_blocks.py [--requests 64] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
import vllm._custom_ops  # noqa: F401  # loads the kernels
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from roll.strategy.vllm.worker_side.seeds import BLOCK, BlockSampler


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Return the median time of a call, in microseconds."""
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="with a seed each")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    mode = "processed_logprobs"
    samplers = (TopKTopPSampler(mode).forward_cpu, BlockSampler(mode).sample)
    print("| vocabulary | seeds one by one | in blocks | without seeds |\n|---:|---:|---:|---:|")
    for vocab, calls in ((64, 4 * BLOCK), (8192, 2 * BLOCK), (151936, 20)):
        logits = torch.randn(args.requests, vocab)
        generators = {i: torch.Generator().manual_seed(i) for i in range(args.requests)}
        sides = [(each, generators) for each in samplers] + [(samplers[1], {})]
        taken = [
            microseconds(partial(sampler, logits, drawers, None, None), calls)
            for sampler, drawers in sides
        ]
        print(f"| {vocab} | {' | '.join(f'{each:.0f} us' for each in taken)} |")


if __name__ == "__main__":
    main()
