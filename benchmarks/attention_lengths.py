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

from benchmarks.packed_rows import LikelihoodLoss, rows
from benchmarks.process_meter import two_cores
from benchmarks.vs_trl import CASES, make_model
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.platform.machine import free_port
from roll.strategy.build import build_train
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import make_spec

TOKENS, BUDGET = 8192, 4096
"""Tokens of an update and of a micro-batch."""
KERNELS = ("sdpa", "eager")


def build(spec: WorkerSpec, folder: Path, kernel: str) -> TrainStrategy[PolicyTerms]:
    """Build a backend of one rank with compiled layers.

    Args:
        kernel: one of `KERNELS`.
    """
    role = TrainRole(
        pool="p",
        strategy=Fsdp2Config(),
        optimizer=AdamWConfig(lr=1e-5),
        max_tokens_per_microbatch=BUDGET,
    )
    model = ModelConfig.model_validate({"path": str(folder), "attention": kernel, "compile": True})
    return build_train(role, model, spec, PolicyHead(1.0, 1024), total_steps=None)


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
        made = [build(spec, Path(name), kernel) for kernel in KERNELS]
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
