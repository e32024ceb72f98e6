"""Benchmark of `model.attention` in compiled layers without a GPU: updates of a small model on rows
of several lengths, with the kernel `sdpa` and with `eager`, matrix products that are compiled with
the rest of a layer.

The table has tokens per second on two cores. Rounds of both take turns; the fastest of each counts.

    python benchmarks/attention_lengths.py [--rounds 5] [--lengths 64,136,256,512,1024]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch

from benchmarks.packed_rows import LikelihoodLoss, build, rows
from benchmarks.process_meter import two_cores
from benchmarks.vs_trl import CASES, make_model
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.sections.model import ModelConfig
from roll.core.batches import RolloutBatch
from roll.platform.machine import free_port
from roll.strategy.interfaces import TrainStrategy
from tests.contract.ranks import make_spec

TOKENS, BUDGET = 8192, 4096
"""Tokens of an update and of a micro-batch."""


def seconds(strategy: TrainStrategy[PolicyTerms], batch: RolloutBatch) -> float:
    """Return the time of an update."""
    begin = time.perf_counter()
    strategy.train(batch, LikelihoodLoss())
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="64,136,256,512,1024")
    args = parser.parse_args()
    two_cores()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), CASES["fixed"])
        spec = make_spec(0, 1, free_port())
        models = [
            ModelConfig.model_validate({"path": name, "attention": kernel, "compile": True})
            for kernel in ("sdpa", "eager")
        ]
        made = [build(spec, model, "fsdp2", packing=False, budget=BUDGET) for model in models]
        print("| tokens of a row | sdpa, tokens/s | eager | ratio |\n|---|---|---|---|")
        for length in map(int, args.lengths.split(",")):
            batch = rows(torch.full((TOKENS // length,), length))
            for strategy in made:
                seconds(strategy, batch)
            taken = [[seconds(strategy, batch) for strategy in made] for _ in range(args.rounds)]
            total = int(batch.lengths.sum())
            kernel, products = (total / min(each) for each in zip(*taken, strict=True))
            ratio = products / kernel
            print(f"| {length} | {kernel:.0f} | {products:.0f} | {ratio:.2f} |", flush=True)
        for strategy in reversed(made):
            strategy.close()


if __name__ == "__main__":
    main()
