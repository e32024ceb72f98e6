"""Frozen parameters keep every bit; all others learn as plain PyTorch with the same ones frozen."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contract.backends import TRAIN_BACKENDS
from tests.contract.freeze_job import CASES, job
from tests.contract.ranks import run_ranks
from tests.contract.train_job import ADAM, plain_loss, relative_distance, train_batch
from tests.tiny import save_tiny_model
from tests.turns import in_groups

QUICK = ("fsdp2", "deepspeed-zero2", "megatron-pp2")
OTHERS = [backend.name for backend in TRAIN_BACKENDS if backend.name not in QUICK]
Ranks = list[dict[str, Any]]


@dataclass(frozen=True)
class Runs:
    backend: str
    folder: Path
    """That of the models."""
    worlds: dict[int, Ranks]
    """By number of ranks what each rank found."""


@pytest.fixture(scope="module", params=[*in_groups(QUICK), *in_groups(OTHERS, pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("frozen")
    backend = next(each for each in TRAIN_BACKENDS if each.name == request.param)
    for name in ("tied", "untied"):
        save_tiny_model(folder / name, tied=name == "tied", experts=backend.experts)
    made = partial(job, backend=request.param)
    found = {
        world: run_ranks(world, made, folder / str(world), timeout_s=300)
        for world in ((1, 2) if backend.differs_alone else (2,))
    }
    return Runs(request.param, folder, found)


def every_rank(runs: Runs) -> Ranks:
    return [rank for ranks in runs.worlds.values() for rank in ranks]


def cases(rank: dict[str, Any]) -> list[str]:
    return [name for name in rank if name != "said"]


def patterns(case: str) -> tuple[str, ...]:
    return CASES[case.split(",")[0]]


def fits(case: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns(case))


def test_frozen_parameters_keep_every_bit_and_only_they(runs: Runs) -> None:
    for rank in every_rank(runs):
        for case in cases(rank):
            run = rank[case]
            assert run["frozen"] == {name for name in run["start"] if fits(case, name)}, case
            for name, value in run["start"].items():
                assert torch.equal(value, run["weights"][name]) == fits(case, name), (case, name)


def test_all_others_learn_as_in_plain_torch(runs: Runs) -> None:
    ranks = every_rank(runs)
    for case in cases(ranks[0]):
        head = case.split(", ")[1]
        want = plain_updates(runs.folder / head, patterns(case))
        for rank in ranks:
            assert relative_distance(rank[case]["weights"], want) < 2e-5, case


def test_a_resumed_run_has_the_same_weights_and_so_has_what_is_saved(runs: Runs) -> None:
    for rank in every_rank(runs):
        for case in cases(rank):
            run = rank[case]
            for name, value in run["weights"].items():
                assert torch.equal(value, run["resumed"][name]), (case, name)
                assert torch.equal(value, run["saved"][name]), (case, name)


def test_a_part_of_a_joined_tensor_is_refused_on_all_ranks(runs: Runs) -> None:
    for rank in every_rank(runs):
        if runs.backend.startswith("megatron"):
            assert "q_proj.weight is frozen and model.layers.0.self_attn.k_proj" in rank["said"]
            assert "freeze all 3 parameters of it, or none" in rank["said"]
        else:
            assert rank["said"] == ""


@cache
def plain_updates(path: Path, freeze: tuple[str, ...]) -> dict[str, Tensor]:
    """Two steps of `torch.optim.AdamW` at the rates of `ADAM`: half of the peak, and the peak."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    stays = [fnmatchcase_any(name, freeze) for name, _ in model.named_parameters()]
    learns = [p for p, stay in zip(model.parameters(), stays, strict=True) if not stay]
    groups = [
        {"params": [p for p in learns if p.dim() >= 2], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in learns if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=ADAM.betas, eps=ADAM.eps)
    for lr in (ADAM.lr / 2, ADAM.lr):
        optimizer.zero_grad()
        plain_loss(model, train_batch()).backward()
        torch.nn.utils.clip_grad_norm_(learns, ADAM.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    model.save_pretrained(path / "_".join(freeze).replace("*", "+"))
    return load_file(path / "_".join(freeze).replace("*", "+") / "model.safetensors")


def fnmatchcase_any(name: str, found: tuple[str, ...]) -> bool:
    # All experts of a layer are one parameter in transformers.
    saved = name.replace("experts.gate_up_proj", "experts.0.gate_proj.weight")
    saved = saved.replace("experts.down_proj", "experts.0.down_proj.weight")
    return any(fnmatchcase(saved, pattern) for pattern in found)
