"""Every optimizer of FSDP2 takes the steps of PyTorch's own in one process, and those that train
experts take the same where ranks share them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.sections.optimizers.kinds import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from roll.core.batches import RolloutBatch
from roll.strategy.training.schedule import lr_at
from tests.contract.optimizer_job import (
    FACTORS,
    KINDS,
    SHARED,
    SHARING,
    STEPS,
    TRAINED,
    gradients,
    sharded_steps,
    tiny_model,
    training,
)
from tests.contract.ranks import run_ranks
from tests.contract.train_job import plain_loss, train_batch
from tests.tiny import save_tiny_model

LAYOUTS = [(1, "shards"), (2, "shards"), (4, "copies"), (4, "tp")]
Plain = list[tuple[torch.optim.Optimizer, float]]


def plain_optimizers(model: PreTrainedModel, config: OptimizerConfig) -> Plain:
    """PyTorch's optimizers as its documentation says, with their peaks."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() == 1]

    def decaying(first: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
        return [
            {"params": first, "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    match config:
        case AdamWConfig(lr=lr, betas=betas, eps=eps):
            groups = decaying(matrices, config.weight_decay)
            return [(torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True), lr)]
        case AdamW8bitConfig(lr=lr, betas=betas, eps=eps):
            from torchao.optim import AdamW8bit

            groups = decaying(matrices, config.weight_decay)
            return [(AdamW8bit(groups, lr=lr, betas=betas, eps=eps), lr)]
        case SgdConfig(lr=lr):
            groups = decaying(matrices, config.weight_decay)
            return [(torch.optim.SGD(groups, lr=lr, momentum=config.momentum), lr)]
        case AdafactorConfig(lr=lr):
            groups = decaying(matrices, config.weight_decay)
            return [(torch.optim.Adafactor(groups, lr=lr), lr)]
        case MuonConfig(lr=lr, others=others):
            hidden = [p for name, p in named.items() if ".layers." in name and p.dim() == 2]
            outer = [p for name, p in named.items() if ".layers." not in name and p.dim() == 2]
            assert others.lr is not None
            muon = torch.optim.Muon(
                hidden,
                lr=lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                adjust_lr_fn=config.scale,
            )
            adamw = torch.optim.AdamW(
                decaying(outer, others.weight_decay),
                lr=others.lr,
                betas=others.betas,
                eps=others.eps,
                fused=True,
            )
            return [(muon, lr), (adamw, others.lr)]


def take(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """A step, without compiled code."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_steps_on_shards_are_those_of_one_process_to_the_bit(
    world: int, layout: str, tmp_path: Path
) -> None:
    ranks = run_ranks(world, partial(sharded_steps, layout=layout), tmp_path, timeout_s=200)
    for name, config in KINDS.items():
        model = tiny_model()
        optimizers = plain_optimizers(model, config)
        for step in range(STEPS):
            for p, gradient in zip(
                model.parameters(), gradients(model, step).values(), strict=True
            ):
                p.grad = gradient
            for optimizer, peak in optimizers:
                take(optimizer, lr_at(step, config, STEPS, peak))
        for rank in ranks:
            for key, p in model.named_parameters():
                assert torch.equal(rank[name][key], p), (name, key)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("optimizers")
    save_tiny_model(folder / "model", tied=False, seed=1)
    found = {
        world: run_ranks(world, training, folder / str(world), timeout_s=300) for world in (2, 1)
    }
    found[0] = [{"folder": folder}]
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_a_plain_loop(
    runs: dict[int, list[dict[str, Any]]], name: str, world: int
) -> None:
    path = runs[0][0]["folder"] / "model"
    batch = train_batch()
    want = plain_steps(path, name, batch)
    # Other sums of the same rows, which differ between processors, too. Muon rounds to bfloat16,
    # where a last bit of a gradient can become half a percent, and raises the smallest singular
    # values. A last bit can also choose the next number of 8 bits.
    least = {"adamw_8bit": 1e-3, "muon": 5e-3}.get(name, 1e-4)
    again = plain_steps(path, name, batch.select(range(len(batch) - 1, -1, -1)))
    for rank in runs[world]:
        for key, step in want.items():
            got = rank[name]["weights"][key] - rank[name]["start"][key]
            assert far(got, step) < max(least, 3 * far(again[key], step)), key
            assert far(got, step) < 0.1, key


def plain_steps(path: Path, name: str, batch: RolloutBatch) -> dict[str, Tensor]:
    """What a loop of plain PyTorch adds to each weight."""
    config = TRAINED[name]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizers = plain_optimizers(model, config)
    for factor in FACTORS:
        model.zero_grad()
        plain_loss(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        assert norm > config.max_grad_norm
        for optimizer, peak in optimizers:
            take(optimizer, peak * factor)
    return {key: p.detach() - start[key] for key, p in model.named_parameters()}


NEAR = {"adamw": 1e-4, "adamw_8bit": 1e-2, "adafactor": 1e-4, "sgd": 1e-4, "muon": 2e-2}
"""Largest part of one update that may differ between one rank and two."""


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_a_resumed_run_goes_on_to_the_bit(
    runs: dict[int, list[dict[str, Any]]], name: str, world: int
) -> None:
    for rank in runs[world]:
        mine = rank[name]
        assert mine["resumed_metrics"] == mine["metrics"][-1]
        assert [each["lr"] for each in mine["metrics"]] == pytest.approx(
            [TRAINED[name].lr * factor for factor in FACTORS]
        )
        for key, tensor in mine["weights"].items():
            assert torch.equal(mine["resumed"][key], tensor), key
            assert not torch.equal(tensor, mine["saved"][key]), key
        assert "optimizer.kind" in mine["other"]


@pytest.mark.parametrize("name", TRAINED)
def test_one_rank_goes_on_where_two_were(runs: dict[int, list[dict[str, Any]]], name: str) -> None:
    one, two = runs[1][0][name], runs[2][0][name]
    for key, saved in two["saved"].items():
        assert torch.equal(one["loaded 2"][key], saved), key
        moved = two["weights"][key] - saved
        assert far(one["after 2"][key] - saved, moved) < NEAR[name], key


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_before_the_first_step_begins_anew(
    runs: dict[int, list[dict[str, Any]]], name: str, world: int
) -> None:
    """Also in an optimizer that has taken steps, which must forget them."""
    path = runs[0][0]["folder"] / "model"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for rank in runs[world]:
        for key, p in model.named_parameters():
            assert torch.equal(rank[name]["loaded 0"][key], p), key
            assert torch.equal(rank[name]["after 0"][key], rank[name]["first"][key]), key


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_model(folder / "model", tied=False, seed=1, experts=True)
    job = partial(training, backend=SHARED)
    return {world: run_ranks(world, job, folder / str(world), timeout_s=300) for world in (2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_ranks_that_share_experts_take_the_steps_of_one_that_has_all(
    shared: dict[int, list[dict[str, Any]]], name: str
) -> None:
    one = shared[1][0][name]
    experts = [key for key in one["start"] if ".experts." in key]
    assert experts
    for two in (rank[name] for rank in shared[2]):
        assert two["start"].keys() == one["start"].keys()
        for key, start in one["start"].items():
            step = one["weights"][key] - start
            assert float(step.norm()) > 0, key
            assert far(two["first"][key] - start, one["first"][key] - start) < NEAR[name], key
            assert far(two["weights"][key] - start, step) < NEAR[name], key


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_ranks_that_share_experts_resume_to_the_bit_and_one_rank_goes_on(
    shared: dict[int, list[dict[str, Any]]], name: str
) -> None:
    one = shared[1][0][name]
    for two in (rank[name] for rank in shared[2]):
        assert two["resumed_metrics"] == two["metrics"][-1]
        for key, tensor in two["weights"].items():
            assert torch.equal(two["resumed"][key], tensor), key
            assert torch.equal(one["loaded 2"][key], two["saved"][key]), key
            moved = tensor - two["saved"][key]
            assert far(one["after 2"][key] - two["saved"][key], moved) < NEAR[name], key
