"""Comparison of the memory that `roll check` estimates with the memory that ranks really have.

Five random models are trained for two steps, each on several ranks with fsdp2: on CPUs, or with
`--device cuda` on a GPU for each rank, by the books of PyTorch's allocator.

    python benchmarks/memory_estimate.py [--ranks 2] [--models qwen3,llama,...] [--device cpu|cuda]

The table shows, in MB, the estimate of docs/memory.md, the peak of the rank with most (without the
pages of files, and above what the process had before it loaded the model), and their quotient.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peak_memory import meter, return_freed
from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.commands.memory.formula import trained
from roll.commands.memory.needs import Needs, Passes
from roll.commands.memory.sizes import Learned, sizes_of
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.core.batches import TrainBatch
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import run_ranks

MB = 1e6
STEPS = 2
"""Steps of each model; the first makes the moments."""
LIMIT_S = 3600
"""Longest time that the ranks may take."""
WIDTH = 256
"""Tokens of a row."""
CHUNK = 256


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model_type: str
    sizes: dict[str, Any]
    dtype: Literal["float32", "bfloat16"] = "float32"
    rows: int = 4
    rows_at_once: int = 4
    checkpointing: bool = False
    offload: bool = False
    """Inputs of layers lie in host memory; with `checkpointing`."""

    @property
    def strategy(self) -> Fsdp2Config:
        return Fsdp2Config(
            activation_checkpointing=self.checkpointing, offload_activations=self.offload
        )


_DENSE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
CASES = {
    "qwen3": Case("qwen3", _DENSE),
    "llama": Case("llama", _DENSE, rows_at_once=2),
    "qwen2": Case("qwen2", _DENSE | {"tie_word_embeddings": True}, dtype="bfloat16"),
    "mistral": Case("mistral", _DENSE | {"num_hidden_layers": 12}, checkpointing=True),
    "qwen3_moe": Case(
        "qwen3_moe",
        _DENSE
        | {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
        },
    ),
}


class NegativeLogprob:
    """Loss -log p of each token."""

    def __call__(self, terms: PolicyTerms, batch: TrainBatch) -> TokenLoss:
        return TokenLoss(loss_BT=-terms.logprobs_BT)


def make_model(case: Case, folder: Path) -> None:
    """Write a random model."""
    config = AutoConfig.for_model(case.model_type, **case.sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train(spec: WorkerSpec, results: Path, *, case: Case, model: Path) -> dict[str, int]:
    """Load the model on a rank and train it; return its peak."""
    return_freed()
    group = GroupMembership(spec)
    g = torch.Generator().manual_seed(spec.rank)
    tokens = torch.randint(0, case.sizes["vocab_size"], (case.rows, WIDTH), generator=g)
    batch = TrainBatch(
        tokens=tokens,
        lengths=torch.full((case.rows,), WIDTH),
        loss_mask=torch.ones(case.rows, WIDTH, dtype=torch.bool),
        token_weights=torch.full((case.rows, WIDTH), 1e-4),
    )
    role = TrainRole(
        pool="p",
        strategy=case.strategy,
        max_tokens_per_microbatch=case.rows_at_once * WIDTH,
        logprob_chunk_tokens=CHUNK,
    )
    gc.collect()
    with meter(spec.platform) as memory:
        config = ModelConfig(path=str(model), dtype=case.dtype)
        strategy = build_train(role, config, spec, PolicyHead(1.0, CHUNK), total_steps=None)
        for _ in range(STEPS):
            strategy.train(batch, NegativeLogprob())
    strategy.close()
    group.leave()
    return {"peak": memory.peak_bytes}


def estimate(case: Case, folder: Path, ranks: int) -> Needs:
    """Return what `roll check` would print."""
    sizes = sizes_of(ModelConfig(path=str(folder)))
    assert sizes is not None
    passes = Passes(
        tokens=case.rows_at_once * WIDTH,
        chunk_tokens=CHUNK,
        ranks=ranks,
        width=2 if case.dtype == "bfloat16" else 4,
    )
    return trained(sizes, case.strategy, passes, Learned(sizes.total, head=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    print("| model | estimate | measured | quotient | parts of the estimate |")
    print("|---|---:|---:|---:|---|")
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            case = CASES[name]
            make_model(case, folder)
            needs = estimate(case, folder, args.ranks)
            job = partial(train, case=case, model=folder)
            found = run_ranks(
                args.ranks, job, folder / "ranks", timeout_s=LIMIT_S, platform=args.device
            )
        peak = max(each["peak"] for each in found)
        parts = ", ".join(
            f"{part} {getattr(needs, part) / MB:.0f}"
            for part in ("weights", "gradients", "moments", "activations", "buffers")
        )
        quotient = needs.total / peak
        print(
            f"| {name} | {needs.total / MB:.0f} | {peak / MB:.0f} | {quotient:.2f} | {parts} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
