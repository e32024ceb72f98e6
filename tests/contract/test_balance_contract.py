"""The loss that balances experts on Megatron, against a plain formula: no layout and no padding
changes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.core.batches import RolloutBatch
from tests.contract.backends import PACKING
from tests.contract.balance_job import FACTOR, batch, job
from tests.contract.ranks import run_ranks
from tests.contract.train_job import gradient, plain_loss, relative_distance
from tests.tiny import save_tiny_model

ROUTER = "mlp.gate.weight"
PAIRS = ((0, 1), (2, 3))
WHOLE, PASSES, ALONE = ((0, 1, 2, 3),), ((0, 1), (), (2,), (3,)), ((0,), (1,), (2,), (3,))
"""Rows of the micro-batches of all data parallel ranks. Of `PASSES` the first rank has one
without rows."""
Parts = tuple[tuple[int, ...], ...]
BUDGETS: dict[Parts, int] = {WHOLE: 1000, PASSES: 20, ALONE: 20, PAIRS: 1000}
Layout = tuple[dict[str, Any], Parts]
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"recomputed": ({"recompute": "full"}, WHOLE)},
    2: {
        "dp": ({}, PASSES),
        "ep": ({"ep": 2}, ALONE),
        "cp": ({"cp": 2}, WHOLE),
        # Each row is filled up to a multiple of four.
        "cp, packed": ({"cp": 2, PACKING: True}, WHOLE),
        # 43 tokens, which two tensor parallel ranks fill up; rows of 13 and 30 tokens.
        "tp, packed": ({"tp": 2, PACKING: True}, WHOLE),
        "ep, packed": ({"ep": 2, PACKING: True}, PAIRS),
    },
    # The second stage divides the padding over tensor parallel ranks, the first has it divided.
    4: {"tp, pp": ({"tp": 2, "pp": 2}, WHOLE)},
}
CASES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
Runs = dict[tuple[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("balance")
    save_tiny_model(made / "experts", experts=True)
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    found = {}
    for ranks, layouts in LAYOUTS.items():
        for number, (name, (options, parts)) in enumerate(layouts.items()):
            work = partial(job, options=options, budget=BUDGETS[parts])
            home = folder / f"{ranks}_{number}"
            found[ranks, name] = run_ranks(ranks, work, home, timeout_s=250)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), CASES)
def test_gradients_are_those_of_the_formula(
    runs: Runs, folder: Path, ranks: int, layout: str
) -> None:
    results = runs[ranks, layout]
    want = wanted(folder / "experts", LAYOUTS[ranks][layout][1])
    for each in results:
        found = gradient(each, results[0]["start"])
        shared = want.keys() & found.keys()  # experts have other names in files
        assert f"model.layers.0.{ROUTER}" in shared
        assert (
            relative_distance(*({name: e[name] for name in shared} for e in (found, want))) < 1e-5
        )


def wanted(folder: Path, parts: Parts) -> dict[str, Tensor]:
    """Gradients of the loss, and of the mean of the balancing loss over parts of the batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    rows = batch()
    total = plain_loss(model, rows)
    for part in filter(None, parts):
        total = total + FACTOR * balance(model, rows.select(part)) / len(parts)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def balance(model: PreTrainedModel, rows: RolloutBatch) -> Tensor:
    """E * sum_i f_i P_i, added over layers: the share of tokens that expert i gets, times the mean
    of its probability (arXiv 2101.03961)."""
    passes = [
        model(row[None, :length], output_router_logits=True)
        for row, length in zip(rows.tokens, rows.lengths.tolist(), strict=True)
    ]
    config, total = model.config, torch.zeros(())
    for layer in range(config.num_hidden_layers):
        logits_NE = torch.cat([each.router_logits[layer] for each in passes])
        chosen = logits_NE.topk(config.num_experts_per_tok, dim=-1).indices
        share_E = torch.bincount(chosen.flatten(), minlength=config.num_experts) / chosen.numel()
        mean_E = logits_NE.softmax(-1).mean(0)
        total = total + config.num_experts * (share_E * mean_E).sum()
    return total
