"""What every rank of a backend with compiled layers is put through, beside the same without."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.config.sections.strategy import HfScoreConfig
from roll.config.sections.training import ScoreRole
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score
from roll.strategy.training.heads import PolicyHead
from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.train_job import EntropyBonusLoss, exported, gradient, rows_of, train_batch

PACKED: dict[str, Any] = {"packing": True}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True, "offload_activations": True}
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "down_proj"))
SHAPES = ((20, 8), (60, 8), (60, 3), (100, 5), (1, 4), (1, 1))
"""Tokens of a micro-batch and rows of a step, so that lengths and numbers of rows differ."""


@dataclass(frozen=True)
class Case:
    backend: str
    """One of `TRAIN_BACKENDS`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `TrainBackend.build`."""
    lora: LoraConfig | None = None
    attention: str = "sdpa"


CASES = {
    "padded": Case("fsdp2"),
    "products": Case("fsdp2", attention="eager"),
    "packed": Case("fsdp2", PACKED),
    "recomputed": Case("fsdp2", PACKED | RECOMPUTED),
    "adapter": Case("fsdp2", PACKED | RECOMPUTED, LORA),
    "adapter-ulysses": Case("fsdp2-ulysses2", PACKED | RECOMPUTED, LORA),
    "zero2": Case("deepspeed-zero2", PACKED),
    "zero3": Case("deepspeed-zero3", PACKED),
}
"""Without a GPU each trace takes half a minute; there the tests take those that have several of
what may matter. Tests with a GPU take all that need no second rank."""


def job(
    spec: WorkerSpec, folder: Path, *, cases: Sequence[str], backend: str | None, scored: bool
) -> dict[str, Any]:
    """Build each case twice, without and with compiled layers, and compare in the test.

    Args:
        backend: backend of torch.compile; None: its own, which calls a C++ compiler.
        scored: compare backend `hf`, too.
    """
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
    torch.compiler.set_default_backend(backend)
    model = ModelConfig(path=str(folder.parent / "untied"))
    keeper = TRAIN_BACKENDS[0].build(spec, model)  # for its process group, which the others share
    results: dict[str, Any] = {"scored": _scores(spec, model) if scored else None}
    for name in cases:
        found = [_steps(spec, model, CASES[name], compiled) for compiled in (False, True)]
        results[name] = dict(zip(("eager", "compiled"), found, strict=True))
    results["children"] = _children()
    keeper.close()
    return results


def _scores(spec: WorkerSpec, model: ModelConfig) -> list[Any]:
    """Log-probs of backend `hf`, without and with compiled layers."""
    role = ScoreRole(pool="p", strategy=HfScoreConfig())
    found = []
    for compiled in (False, True):
        told = model.model_copy(update={"compile": compiled})
        scorer = build_score(role, told, spec, PolicyHead(1.0, 1024))
        found.append(scorer.score(train_batch()).logprobs_BT)
    return found


def _steps(spec: WorkerSpec, model: ModelConfig, case: Case, compiled: bool) -> dict[str, Any]:
    made = next(b for b in TRAIN_BACKENDS if b.name == case.backend)
    changes = {"compile": compiled, "lora": case.lora, "attention": case.attention}
    told = model.model_copy(update=changes)
    torch._dynamo.reset()
    counters.clear()
    strategy = made.build(spec, told, budget=40, **case.options)
    rows = rows_of(strategy, train_batch())
    start = exported(strategy)
    before = strategy.score(rows, entropy=True)
    metrics = strategy.train(rows, EntropyBonusLoss())
    run = {"weights": exported(strategy)}
    graphs = [_graphs()]
    if compiled:
        for budget, count in SHAPES:
            strategy._max_tokens = budget  # type: ignore[attr-defined]
            some = rows.select(list(range(min(count, len(rows)))))
            strategy.score(some)
            strategy.train(some, EntropyBonusLoss())
        graphs.append(_graphs())
    strategy.close()
    return {
        "logprobs": before.logprobs_BT,
        "entropy": before.entropy_BT,
        "loss": metrics.values_by_name()["loss/total"],
        "gradient": gradient(run, start),
        "manifest": [meta.name for meta in strategy.weight_manifest().tensors],
        "graphs": graphs,
    }


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _children() -> list[str]:
    """Commands of the processes that this one has started and that still run."""
    own, found = os.getpid(), []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue  # ended meanwhile
        if parent == own:
            found.append(command)
    return found


def job_of(cases: Sequence[str], backend: str | None, *, scored: bool) -> Any:
    return partial(job, cases=cases, backend=backend, scored=scored)
