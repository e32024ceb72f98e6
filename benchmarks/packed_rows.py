"""Benchmark of packed rows: updates of a small model on rows of unlike and of equal lengths.

For each backend: real tokens per second of processor time, padded and packed. Rounds of both take
turns; the fastest of each counts.

    python benchmarks/packed_rows.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.types import WorkerSpec
from roll.platform.machine import free_port
from roll.strategy.build import build_train
from roll.strategy.interfaces import TrainStrategy
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import make_spec
from tests.tiny import char_tokenizer, rollout_batch, tiny_qwen3

ROWS, LONGEST, BUDGET = 32, 512, 2048
BACKENDS: dict[str, Fsdp2Config | MegatronConfig] = {
    "fsdp2": Fsdp2Config(),
    "megatron": MegatronConfig(),
}


class LikelihoodLoss:
    """Minus the log-prob of each trained token."""

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        return TokenLoss(loss_BT=-terms.logprobs_BT)


def rows(lengths: torch.Tensor) -> RolloutBatch:
    """Return rows of these lengths, of which all tokens but the first are trained."""
    drawn = rollout_batch(len(lengths))
    at = torch.arange(int(lengths.max()))
    mask = (at > 0) & (at < lengths[:, None])
    tokens = torch.randint(4, 60, mask.shape, generator=torch.Generator().manual_seed(0))
    return RolloutBatch(
        sample_ids=drawn.sample_ids,
        tags=drawn.tags,
        group_ids=drawn.group_ids,
        tokens=tokens,
        lengths=lengths,
        loss_mask=mask,
        token_weights=mask.float() / mask.sum(),
    )


def build(
    spec: WorkerSpec, model: ModelConfig, backend: str, *, packing: bool, budget: int = BUDGET
) -> TrainStrategy[PolicyTerms]:
    """Build a backend on one rank.

    Args:
        budget: most tokens of a micro-batch.
    """
    role = TrainRole(
        pool="p",
        strategy=BACKENDS[backend],
        optimizer=AdamWConfig(lr=1e-5),
        max_tokens_per_microbatch=budget,
        packing=packing,
    )
    return build_train(role, model, spec, PolicyHead(1.0, 1024), total_steps=None)


def seconds(strategy: TrainStrategy[PolicyTerms], batch: RolloutBatch) -> float:
    """Return the processor time of an update."""
    begin = time.process_time()
    strategy.train(batch, LikelihoodLoss())
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    unlike = (torch.rand(ROWS, generator=draw) * 4.2 + 2).exp().clamp(max=LONGEST).long()
    kinds = {"unlike": rows(unlike), "equal": rows(torch.full((ROWS,), LONGEST // 2))}
    with tempfile.TemporaryDirectory() as name:
        tiny_qwen3(layers=2, hidden=256).save_pretrained(name)
        char_tokenizer().save_pretrained(name)
        print("| backend | lengths | padded, tokens/s | packed | ratio |")
        print("|---|---|---|---|---|")
        for backend in BACKENDS:
            spec = make_spec(0, 1, free_port())
            model = ModelConfig(path=name)
            made = [build(spec, model, backend, packing=packing) for packing in (False, True)]
            for kind, batch in kinds.items():
                for strategy in made:
                    seconds(strategy, batch)
                taken = [[seconds(strategy, batch) for strategy in made] for _ in range(rounds)]
                total = int(batch.lengths.sum())
                padded, packed = (total / min(each) for each in zip(*taken, strict=True))
                ratio = packed / padded
                print(
                    f"| {backend} | {kind} | {padded:.0f} | {packed:.0f} | {ratio:.2f} |",
                    flush=True,
                )
            for strategy in reversed(made):
                strategy.close()


if __name__ == "__main__":
    main()
