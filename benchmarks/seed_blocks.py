"""Time that vLLM's sampler without a GPU needs for the seeds of a step, and for the rest.

The seeds are drawn one by one, as vLLM does, and in blocks
(roll/strategy/vllm/worker_side/seeds.py); the shortest of five times of a step.

    python benchmarks/seed_blocks.py [--requests 64] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from benchmarks.norm_kernels import microseconds  # loads the kernels, too
from roll.strategy.vllm.worker_side.seeds import BlockSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="with a seed each")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    mode = "processed_logprobs"
    samplers = (TopKTopPSampler(mode).forward_cpu, BlockSampler(mode).sample)
    print("| vocabulary | seeds one by one | in blocks | without seeds |\n|---:|---:|---:|---:|")
    for vocab in (64, 8192, 151936):
        logits = torch.randn(args.requests, vocab)
        generators = {i: torch.Generator().manual_seed(i) for i in range(args.requests)}
        sides = [(each, generators) for each in samplers] + [(samplers[1], {})]
        taken = [
            microseconds(partial(sampler, logits, drawers, None, None))
            for sampler, drawers in sides
        ]
        print(f"| {vocab} | {' | '.join(f'{each:.0f} us' for each in taken)} |")


if __name__ == "__main__":
    main()
