"""Comparison of all training backends and layouts: twenty steps from one checkpoint and data.

The reference is a plain PyTorch loop over a Hugging Face model: whole rows, whole logits, autograd
and AdamW. Everything is float32 on the CPU. Prints one table in Markdown; the exit code is 0 if all
losses and gradient norms agree to 1e-4 relative.

    python benchmarks/backend_parity.py [--steps 20] [--model dense,tied,moe] [--out table.md]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from roll.algorithms.loss_interface import PolicyTerms, TokenLoss
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.training import TrainRole
from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from roll.core.types import WorkerSpec
from roll.platform import get_platform
from roll.platform.machine import free_port
from roll.strategy.build import build_train
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import make_spec

TOLERANCE = 1e-4
ROWS, LONGEST, VOCAB = 8, 20, 67  # an odd vocabulary: it is padded under tensor parallelism
BUDGET = 64  # padded tokens of a micro-batch, so that a step has several, of different shapes
TEMPERATURE = 0.8
OPTIMIZER = AdamWConfig(
    lr=1e-3, weight_decay=0.1, warmup_steps=3, schedule="cosine", max_grad_norm=0.5
)


@dataclass(frozen=True)
class Layout:
    """Backend with a number of ranks and settings; one line of the table."""

    name: str
    ranks: int
    strategy: dict[str, Any]


def deepspeed(name: str, ranks: int, **settings: Any) -> Layout:
    return Layout(f"deepspeed {name}", ranks, {"kind": "deepspeed", **settings})


HUGGING_FACE = (
    Layout("fsdp2", 1, {"kind": "fsdp2"}),
    Layout("fsdp2 x2", 2, {"kind": "fsdp2"}),
    deepspeed("zero2 x1", 1, stage=2),
    deepspeed("zero0 x2", 2, stage=0),
    deepspeed("zero1 x2", 2, stage=1),
    deepspeed("zero2 x2", 2, stage=2),
    deepspeed("zero2 offload x2", 2, stage=2, offload_optimizer=True),
    deepspeed("zero3 x2", 2, stage=3, whole_below_elements=64),
    deepspeed(
        "zero3 recompute x2", 2, stage=3, whole_below_elements=64, activation_checkpointing=True
    ),
)
"""Layouts of the backends that train the model class of Hugging Face itself."""


def megatron(name: str, ranks: int, **sizes: Any) -> Layout:
    return Layout(f"megatron {name}", ranks, {"kind": "megatron", **sizes})


ULYSSES = (
    Layout("fsdp2 ulysses 2", 2, {"kind": "fsdp2", "ulysses": 2}),
    Layout("fsdp2 ulysses 2 replicas 2", 4, {"kind": "fsdp2", "ulysses": 2, "replicas": 2}),
)
DENSE = (
    *HUGGING_FACE,
    *ULYSSES,
    Layout("fsdp2 tp2", 2, {"kind": "fsdp2", "tp": 2}),
    Layout("fsdp2 tp2 dp2", 4, {"kind": "fsdp2", "tp": 2}),
    Layout("fsdp2 tp2 ulysses 2", 4, {"kind": "fsdp2", "tp": 2, "ulysses": 2}),
    megatron("x1", 1),
    megatron("dp2", 2),
    megatron("dp2 distributed", 2, distributed_optimizer=True),
    megatron("tp2", 2, tp=2),
    megatron("tp2 sequence parallel", 2, tp=2, sequence_parallel=True),
    megatron("pp2", 2, pp=2),
    megatron("pp2 layers 3+1", 2, pp=2, layers=[3, 1]),
    megatron("pp2 vpp2", 2, pp=2, vpp=2),
    megatron("pp2 recompute", 2, pp=2, recompute="full"),
    megatron("tp2 pp2", 4, tp=2, pp=2),
    megatron("tp2 dp2", 4, tp=2),
    megatron("cp2", 2, cp=2),
    megatron("cp2 dp2 distributed", 4, cp=2, distributed_optimizer=True),
    megatron("tp2 cp2 sequence parallel", 4, tp=2, cp=2, sequence_parallel=True),
    megatron("pp2 cp2", 4, pp=2, cp=2),
)
SPARSE = (
    *HUGGING_FACE,
    *ULYSSES,
    Layout("fsdp2 ep2", 2, {"kind": "fsdp2", "ep": 2}),
    Layout("fsdp2 ep2 dp2", 4, {"kind": "fsdp2", "ep": 2}),
    Layout("fsdp2 ep2 ulysses 2", 4, {"kind": "fsdp2", "ep": 2, "ulysses": 2}),
    megatron("x1", 1),
    megatron("dp2", 2),
    megatron("tp2", 2, tp=2),
    megatron("tp2 ep2 etp1", 2, tp=2, ep=2, etp=1),
    megatron("pp2", 2, pp=2),
    megatron("ep2", 2, ep=2),
    megatron("ep2 pp2", 4, ep=2, pp=2),
    megatron("ep2 cp2", 2, ep=2, cp=2),
)
LAYOUTS = {"dense": DENSE, "tied": DENSE, "moe": SPARSE}


class WeightedLikelihood:
    """Loss for the comparison: log-likelihood weighted by advantages, all above zero, and an
    entropy bonus."""

    reads_entropy = True

    def __call__(self, terms: PolicyTerms, batch: RolloutBatch) -> TokenLoss:
        advantages_BT = batch.require("advantages", made_by="batches")
        assert terms.entropy_BT is not None
        return TokenLoss(loss_BT=-terms.logprobs_BT * advantages_BT - 0.05 * terms.entropy_BT)


def save_model(folder: Path, kind: str) -> None:
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "tie_word_embeddings": kind == "tied",
        # Hugging Face would compute no gradient for the embedding of a padding token.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    config = (
        Qwen3MoeConfig(
            **common,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        )
        if kind == "moe"
        else Qwen3Config(**common)
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def batches(steps: int) -> Iterator[RolloutBatch]:
    """Yield one batch per step, with random rows of different lengths."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        lengths = torch.randint(6, LONGEST + 1, (ROWS,), generator=g)
        at = torch.arange(LONGEST)[None]
        mask = (at >= 4) & (at < lengths[:, None])
        tokens = torch.randint(0, VOCAB, (ROWS, LONGEST), generator=g)
        yield RolloutBatch(
            sample_ids=[str(row) for row in range(ROWS)],
            tags=["default"] * ROWS,
            group_ids=torch.arange(ROWS),
            tokens=tokens.masked_fill(at >= lengths[:, None], 0),
            lengths=lengths,
            loss_mask=mask,
            rewards=torch.zeros(ROWS),
            rollout_logprobs=torch.zeros(ROWS, LONGEST),
            advantages=(0.5 + torch.rand(ROWS, LONGEST, generator=g)) * mask,
            token_weights=mask.float() / mask.sum(),
        )


def plain_steps(folder: Path, steps: int) -> list[tuple[float, float]]:
    """Train with a plain loop of PyTorch on a model of Hugging Face; return (loss, gradient norm)
    of each step."""
    from roll.strategy.training.schedule import lr_at

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    found = []
    for step, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        total = torch.zeros(())
        for row, length in enumerate(batch.lengths.tolist()):
            total = total + _plain_loss(model, batch, row, length)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, OPTIMIZER, steps)
        optimizer.step()
        found.append((float(total.detach()), float(norm)))
    return found


def _plain_loss(model: Any, batch: RolloutBatch, row: int, length: int) -> Tensor:
    assert batch.advantages is not None
    assert batch.token_weights is not None
    tokens = batch.tokens[row, :length]
    logp = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    chosen = logp.gather(-1, tokens[1:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = -chosen * batch.advantages[row, 1:length] - 0.05 * entropy
    return (loss * batch.token_weights[row, 1:length]).sum()


def rank_main(rank: int, ranks: int, port: int, folder: Path, steps: int, kind: str) -> None:
    """Run all layouts with this number of ranks, one after another, as one rank; write the metrics
    to a file. Each rank is a process with this function as its main function."""
    torch.set_num_threads(1)
    spec = make_spec(rank, ranks, port)
    get_platform("cpu").init_process_group(spec, timeout_s=300)
    found = {}
    for layout in LAYOUTS[kind]:
        if layout.ranks == ranks:
            found[layout.name] = _strategy_steps(layout, spec, folder, steps)
    torch.save(found, folder / f"{ranks}_{rank}.pt")


def _strategy_steps(
    layout: Layout, spec: WorkerSpec, folder: Path, steps: int
) -> list[Metrics] | None:
    """Train with one layout; return this rank's part of the metrics of each step. Return None if
    the rank is no data-parallel leader, so that its metrics must not be counted."""
    fields = {
        "pool": "all",
        "strategy": layout.strategy,
        "optimizer": OPTIMIZER.model_dump(),
        "max_tokens_per_microbatch": BUDGET,
    }
    role = TrainRole.model_validate_json(json.dumps(fields))  # with the validation of a run file
    head = PolicyHead(TEMPERATURE, 16)
    model = ModelConfig(path=str(folder), dtype="float32")
    strategy = build_train(role, model, spec, head, total_steps=steps)
    info = strategy.rank_info
    found = [
        strategy.train(batch.split(info.dp_size)[info.dp_rank], WeightedLikelihood())
        for batch in batches(steps)
    ]
    strategy.close()
    return found if info.is_dp_leader else None


def all_steps(folder: Path, kind: str, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Run all layouts; return layout -> (loss, gradient norm) of each step."""
    found: dict[str, list[tuple[float, float]]] = {}
    for ranks in sorted({layout.ranks for layout in LAYOUTS[kind]}):
        spawn(rank_main, (ranks, free_port(), folder, steps, kind), nprocs=ranks)
        shares = [
            torch.load(folder / f"{ranks}_{rank}.pt", weights_only=False) for rank in range(ranks)
        ]
        for name in shares[0]:
            counted = [share[name] for share in shares if share[name] is not None]
            merged = [Metrics.concat(each).values_by_name() for each in zip(*counted, strict=True)]
            found[name] = [(step["loss/total"], step["grad_norm"]) for step in merged]
    return found


def relative(found: list[float], want: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True))


def table(kind: str, folder: Path, steps: int) -> tuple[list[str], bool]:
    """Return the lines of the table in Markdown, and whether all layouts agree with the
    reference."""
    save_model(folder, kind)
    want = plain_steps(folder, steps)
    losses, norms = [step[0] for step in want], [step[1] for step in want]
    lines = [f"| {kind} | hf | {losses[0]:.6f} | {losses[-1]:.6f} | | | |"]
    good = True
    for name, run in all_steps(folder, kind, steps).items():
        loss, norm = [step[0] for step in run], [step[1] for step in run]
        apart = relative(loss, losses), relative(norm, norms)
        agrees = max(apart) <= TOLERANCE
        good = good and agrees
        lines.append(
            f"| {kind} | {name} | {loss[0]:.6f} | {loss[-1]:.6f} | {apart[0]:.1e} | "
            f"{apart[1]:.1e} | {'yes' if agrees else 'NO'} |"
        )
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default=",".join(LAYOUTS), help="some of dense, tied, moe")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    lines = [
        "| model | backend | first loss | last loss | loss apart | norm apart | agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    good = True
    for kind in options.model.split(","):
        with tempfile.TemporaryDirectory() as folder:
            more, agree = table(kind, Path(folder), options.steps)
        lines += more
        good = good and agree
    lines.append(
        f"\n{options.steps} steps in float32; apart: largest relative difference to hf of any step "
        f"(at most {TOLERANCE}). {time.monotonic() - begun:.0f} s."
    )
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
