"""Trainers with models that see: the numbers and gradients of plain transformers."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from roll.core.metrics import Metrics
from tests.contract.ranks import run_ranks
from tests.contract.train_job import gradient, leaders, relative_distance
from tests.contract.vision_job import (
    BLIND,
    CASES,
    INEXACT,
    KEPT,
    LOPSIDED,
    ORDER,
    SCORING,
    job,
    plain_gradient,
    plain_terms,
    refused_job,
    score_job,
    taught_job,
    vision_batch,
    vision_rows,
)
from tests.tiny import save_tiny_model
from tests.turns import in_groups
from tests.vision_models import save_vision_model

FAMILIES = {
    "fsdp2": ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    "fsdp2-ulysses2": ("qwen2_5_vl", "qwen3_vl"),
    "fsdp2-tp2": ("qwen2_vl", "qwen2_5_vl"),  # transformers has no table for the others
    "fsdp2-ep2": ("qwen3_vl_moe",),
    "deepspeed-zero2": ("qwen2_5_vl", "qwen3_vl"),
    "deepspeed-zero3": ("qwen2_5_vl", "qwen3_vl"),
    "megatron-dp2": ("qwen2_vl", "qwen3_vl"),
    "megatron-tp2": ("qwen2_5_vl", "qwen3_vl"),
    "megatron-pp2": ("qwen2_vl", "qwen3_vl"),
    "megatron-ep2": ("qwen3_vl_moe",),
}
"""How parameters and rows are divided matters to pictures; how gradients and moments are divided
does not: of backends that differ in those alone there is one, test_train_contract.py has all."""
QUICK = ("fsdp2-ulysses2", "deepspeed-zero2")
OTHERS = [name for name in FAMILIES if name not in QUICK]
WORLDS = (1, 2)
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        save_vision_model(folder / family, family)
    return folder


@pytest.fixture(scope="module", params=[*in_groups(QUICK), *in_groups(OTHERS, pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, models: Path) -> dict[str, Any]:
    """Results of both worlds: which families, and by number of ranks what each rank found."""
    families = FAMILIES[request.param]
    made = partial(job, backend=request.param, families=families)
    found: dict[str, Any] = {"families": families, "backend": request.param}
    for world in WORLDS:
        out = models / f"{request.param} on {world}"
        found[str(world)] = run_ranks(world, made, out, timeout_s=300)
    return found


@cache
def oracle(path: Path, family: str, freeze: Any, sees: bool) -> Any:
    return plain_gradient(path / family, family, freeze, sees=sees)


def every_case(runs: dict[str, Any]) -> list[tuple[Ranks, str, str]]:
    """All ranks of a world, family and case. On one rank a layout has hardly any, on two all."""
    worlds: list[Ranks] = [runs[str(world)] for world in WORLDS]
    return [(ranks, family, name) for ranks in worlds for family, name in ranks[0]]


def every_rank(runs: dict[str, Any]) -> Ranks:
    return [rank for world in WORLDS for rank in runs[str(world)]]


def test_gradients_and_losses_are_those_of_plain_transformers(
    runs: dict[str, Any], models: Path
) -> None:
    for ranks, family, name in every_case(runs):
        if name in INEXACT:
            continue
        case = CASES[name]
        want, loss = oracle(models, family, case.freeze, case.rows != BLIND)
        for rank in ranks:
            run = rank[family, name]
            assert relative_distance(gradient(run, run["start"]), want) < 5e-6, (family, name)
        together = [rank[family, name] for rank in ranks]
        metrics = Metrics.concat([run["metrics"] for run in leaders(together)]).values_by_name()
        assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6), (family, name)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.values()))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), (family, name)


def test_scores_are_those_of_plain_transformers(runs: dict[str, Any], models: Path) -> None:
    for rank in every_rank(runs):
        for (family, name), run in rank.items():
            case = CASES[name]
            tolerance = 0.05 if case.dtype == "bfloat16" else 1e-5
            check_scores(models, family, case.rows, run["info"], run["before"], tolerance)


def check_scores(
    models: Path, family: str, kind: str, info: Any, terms: Any, tolerance: float
) -> None:
    """Compare log-probs and entropies of a rank's rows with those of each row alone."""
    rows = vision_rows(family)
    share = len(rows) // info.dp_size
    mine = ORDER[kind][share * info.dp_rank : share * (info.dp_rank + 1)]
    for i, number in enumerate(mine):
        chosen, entropy = alone(models, family, number, kind != BLIND)
        end = len(rows[number].tokens)
        found = terms.logprobs_BT[i, 1:end], terms.entropy_BT[i, 1:end]
        torch.testing.assert_close(found[0], chosen, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found[1], entropy, atol=tolerance, rtol=tolerance)


@cache
@torch.no_grad()
def alone(models: Path, family: str, number: int, sees: bool) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(models / family, dtype=torch.float32)
    return plain_terms(model, vision_rows(family)[number], sees=sees)


def test_frozen_parts_keep_every_bit_and_are_not_pushed_again(runs: dict[str, Any]) -> None:
    for rank in every_rank(runs):
        for (family, name), run in rank.items():
            same = {
                key
                for key, value in run["start"].items()
                if torch.equal(value, run["weights"][key])
            }
            assert run["frozen"] <= same, (family, name)
            parts = {part(key) for key in run["frozen"]}
            frozen = set(CASES[name].freeze)
            if CASES[name].lora:
                assert parts >= {"vision", "projector"}
                assert {part(key) for key in run["start"].keys() - same} == {"language"}
            else:
                assert parts == frozen, (family, name)
                assert {part(key) for key in run["start"]} - {
                    part(key) for key in run["start"].keys() - run["frozen"]
                } == frozen


def part(name: str) -> str:
    """Part of a tensor by its name in the checkpoint, as the families name them."""
    if "visual." not in name:
        return "language"
    return "projector" if "merger" in name else "vision"


def test_an_adapter_learns_the_same_on_every_number_of_ranks(runs: dict[str, Any]) -> None:
    alone = runs["1"][0]
    for rank in runs["2"]:
        for (family, name), run in rank.items():
            if CASES[name].lora:
                assert relative_distance(run["weights"], alone[family, name]["weights"]) < 1e-6


@pytest.mark.parametrize("world", WORLDS)
def test_every_backend_scores_as_plain_transformers(models: Path, world: int) -> None:
    families = ("qwen2_5_vl", "qwen3_vl")
    made = partial(score_job, families=families)
    ranks = run_ranks(world, made, models / f"scores on {world}", timeout_s=200)
    for rank in ranks:
        assert len(rank) == len(families) * len(SCORING) * 3
        for (family, _, kind), (info, terms) in rank.items():
            check_scores(models, family, kind, info, terms, 1e-5)


def test_a_teacher_on_megatron_sees_what_its_rows_show(models: Path) -> None:
    made = partial(taught_job, family="qwen3_vl")
    (found,) = run_ranks(1, made, models / "taught", timeout_s=200)
    for number, (row, told) in enumerate(zip(vision_rows("qwen3_vl"), found["rows"], strict=True)):
        wanted, _ = alone(models, "qwen3_vl", number, True)
        logprobs = (told.outputs[0] @ found["head"].weight_VD.T).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(row.tokens)[told.positions_N, None])[:, 0]
        torch.testing.assert_close(chosen, wanted[told.positions_N - 1], atol=1e-5, rtol=1e-5)
        assert len(told.positions_N) == len(row.written)


def test_what_is_saved_is_what_was_trained_and_can_be_used(
    runs: dict[str, Any], models: Path
) -> None:
    kept = [(ranks, family) for ranks, family, name in every_case(runs) if name == KEPT]
    assert {family for _, family in kept} == set(runs["families"])
    for ranks, family in kept:
        out = models / f"{runs['backend']} on {len(ranks)}" / family
        saved = load_file(out / "hf" / "model.safetensors")
        AutoImageProcessor.from_pretrained(out / "hf", backend="pil")
        for rank in ranks:
            run = rank[family, KEPT]
            assert run["weights"].keys() == run["resumed"].keys() == saved.keys()
            for key, value in run["weights"].items():
                assert torch.equal(value, saved[key]), key
                assert torch.equal(value, run["resumed"][key]), key


def test_megatron_refuses_rows_with_pictures_for_a_model_that_reads_none(
    tmp_path: Path,
) -> None:
    save_tiny_model(tmp_path / "text")
    save_vision_model(tmp_path / "qwen2_vl", "qwen2_vl")
    (found,) = run_ranks(1, refused_job, tmp_path / "job", timeout_s=100)
    assert "rows have pictures, and the model of this role reads none" in found["pictures"]
    assert "overlap_grad_reduce: visual." in found["overlap"]
    assert "`model.freeze: [vision, projector]`" in found["overlap"]


def test_the_batch_has_what_the_cases_promise() -> None:
    batch = vision_batch("qwen3_vl", LOPSIDED)
    first, second = batch.split(2)
    assert first.pictures is not None
    assert second.pictures is not None
    assert all(first.pictures)
    assert not any(second.pictures)
    assert first.pictures[0] is first.pictures[1]
