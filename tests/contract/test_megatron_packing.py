"""Packed rows on Megatron in every layout: scores and gradients of padded rows on one rank."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from roll.core.metrics import Metrics
from roll.strategy.training.heads import ScoreHead, ValueHead
from tests.contract.critic_job import critic_batch, squared_error
from tests.contract.layout_job import save_models, squared_score
from tests.contract.packed_job import POLICY, Case, hostile_batch, job, real
from tests.contract.ranks import run_ranks
from tests.contract.train_job import gradient, leaders, relative_distance
from tests.convert.tiny_models import save_model
from tests.tiny import char_tokenizer, tiny_qwen3, tiny_qwen3_moe

CRITIC = Case("critic", head=ValueHead(), loss=squared_error, batch=critic_batch)
CASES: dict[int, dict[str, Case]] = {
    1: {
        "whole": Case("dense", budget=1000),
        "recomputed": Case("dense", {"recompute": "full"}),
        "attention recomputed": Case("window", {"recompute": "attention"}),
        "experts": Case("experts", {"recompute": "full"}),
        "adapter": Case("dense", lora=True),
        "critic": CRITIC,
        "reward model": Case("scorer", head=ScoreHead(), loss=squared_score),
        "sparse attention": Case("sparse", {"recompute": "full"}),
    },
    2: {
        "dp": Case("window"),
        "one row each": Case("dense", budget=1),
        "zero": Case("dense", {"distributed_optimizer": True, "overlap_grad_reduce": True}),
        "tp": Case("dense", {"tp": 2}),
        "sequence parallel": Case("dense", {"tp": 2, "sequence_parallel": True}),
        "pp": Case("window", {"pp": 2, "recompute": "full"}),
        "vpp": Case("dense", {"pp": 2, "vpp": 2}),
        "ep": Case("experts", {"ep": 2}),
        "etp": Case("experts", {"etp": 2}),
        "experts, tp": Case("experts", {"tp": 2}),
        "critic": replace(CRITIC, layout={"tp": 2, "sequence_parallel": True}),
        "sparse attention, tp": Case("sparse", {"tp": 2}),
        "adapter": Case("dense", {"pp": 2, "vpp": 2}, lora=True),
        "cp": Case("dense", {"cp": 2}, batch=hostile_batch),
        "cp, recomputed": Case("dense", {"cp": 2, "recompute": "full"}, budget=1),
        "cp, ep": Case("experts", {"cp": 2, "ep": 2}, batch=hostile_batch),
        "cp, critic": replace(CRITIC, layout={"cp": 2}),
        "cp, adapter": Case("dense", {"cp": 2}, lora=True),
    },
    4: {
        "tp, pp, vpp, ep": Case("experts", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}),
        "cp, dp": Case("dense", {"cp": 2, "distributed_optimizer": True}, batch=hostile_batch),
        # More ranks than heads of keys, and rows that end within a piece.
        "cp 4, window": Case("window", {"cp": 4, "recompute": "attention"}, batch=hostile_batch),
        "cp, tp": Case("experts", {"cp": 2, "tp": 2}, batch=hostile_batch),
        "cp, pp, vpp": Case("dense", {"cp": 2, "pp": 2, "vpp": 2}, batch=hostile_batch),
    },
}


def padded(case: Case) -> str:
    """Name of the result of padded rows on one rank that a case is compared with."""
    return f"padded {case.model}{' adapter' * case.lora} {case.batch.__name__}"


RUNS = [(ranks, name) for ranks, cases in CASES.items() for name in cases]
ALONE = {padded(case): case.alone for cases in CASES.values() for case in cases.values()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("packed")
    save_models(folder)
    for name, family in (("linear", "qwen3_next"), ("sparse", "glm_moe_dsa")):
        made = save_model(folder, family, vocab_size=len(char_tokenizer()))
        shutil.move(made, folder / name)
        char_tokenizer().save_pretrained(folder / name)
    for name, make in (("dense", tiny_qwen3), ("experts", tiny_qwen3_moe)):
        torch.manual_seed(0)
        make(layers=4).save_pretrained(folder / name)
        char_tokenizer().save_pretrained(folder / name)
    everything = {**CASES, 1: {**CASES[1], **ALONE}}
    return {
        ranks: run_ranks(ranks, partial(job, cases=cases), folder / str(ranks), timeout_s=250)
        for ranks, cases in everything.items()
    }


def values_of(terms: Any) -> dict[str, torch.Tensor]:
    """The values of each token, by name."""
    found = {each.name: getattr(terms, each.name) for each in fields(terms)}
    return {name: values_BT for name, values_BT in found.items() if values_BT is not None}


def values(ranks: list[dict[str, Any]]) -> dict[str, float]:
    return Metrics.concat([each["metrics"] for each in leaders(ranks)]).values_by_name()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_gradients_and_losses_are_those_of_padded_rows_on_one_rank(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    case = CASES[ranks][name]
    alone = runs[1][0][padded(case)]
    together = [rank[name] for rank in runs[ranks]]
    want = gradient(alone, alone["start"])
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    for rank in together:
        assert relative_distance(gradient(rank, alone["start"]), want) < 2e-6
    wanted, found = values([alone]), values(together)
    for key in (
        "loss/total",
        "grad_norm",
        "trained_tokens",
        *(("entropy",) * (case.head is POLICY)),
    ):
        assert found[key] == pytest.approx(wanted[key], rel=2e-6), key


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_scores_are_those_of_padded_rows_on_one_rank(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    case = CASES[ranks][name]
    alone = runs[1][0][padded(case)]
    for rank in (each[name] for each in runs[ranks]):
        size = len(rank["lengths"])
        first = rank["info"].dp_rank * size
        assert rank["lengths"] == alone["lengths"][first : first + size]
        for key, whole in values_of(alone["before"]).items():
            wanted, found = whole[first : first + size], getattr(rank["before"], key)
            for one, other in zip(
                real(found, rank["lengths"]), real(wanted, rank["lengths"]), strict=True
            ):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_models_whose_layers_read_on_are_refused(runs: dict[int, list[dict[str, Any]]]) -> None:
    said = runs[1][0]["refused"]["said"]
    assert "packing: a qwen3_next has gated delta nets" in said
    assert "leave `packing` out" in said
