"""Adapters on a training backend, on one rank and on two; PEFT by itself is the oracle."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.core.metrics import Metrics
from roll.models.lora import Delta
from roll.strategy.deepspeed.export import plus_adapter
from tests.contract.lora_job import (
    BACKENDS,
    factors_of,
    job,
    refusals,
    resume_job,
    scored_by_hand,
    seeds_job,
    trained_by_hand,
)
from tests.contract.ranks import run_ranks
from tests.contract.test_train_contract import assert_same_bits
from tests.tiny import save_tiny_model
from tests.turns import in_groups

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=in_groups(BACKENDS, pytest.mark.slow))
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(backend_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(backend_name)
    experts = BACKENDS[backend_name].experts
    save_tiny_model(folder / "model", tied=False, seed=1, experts=experts)
    return folder


@pytest.fixture(scope="module")
def runs(backend_name: str, folder: Path) -> Results:
    full = partial(job, backend_name=backend_name)
    return {world: run_ranks(world, full, folder / str(world), timeout_s=200) for world in (2, 1)}


@pytest.fixture(scope="module")
def resumed_elsewhere(backend_name: str, runs: Results, folder: Path) -> Results:
    """On as many ranks, from the checkpoint of the other number of them."""
    found = {}
    for world, writer in ((1, 2), (2, 1)):
        checkpoint = folder / str(writer) / "checkpoint"
        resume = partial(resume_job, backend_name=backend_name, checkpoint=checkpoint)
        found[world] = run_ranks(world, resume, folder / f"resumed on {world}", timeout_s=200)
    return found


def joined(ranks: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([result[name] for result in leaders(ranks)])


def leaders(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each group of ranks that get the same rows."""
    return [result for result in ranks if result["info"].is_dp_leader]


def length(tensors: dict[str, Tensor]) -> float:
    """Euclidean norm of all elements."""
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).norm())


@pytest.mark.parametrize("world", [2, 1])
def test_a_fresh_adapter_changes_nothing_and_its_base_stays(
    runs: Results, backend_name: str, world: int
) -> None:
    for result in runs[world]:
        assert torch.equal(result["fresh"], result["before"])
        assert torch.equal(result["base"], result["before"])
        assert not torch.equal(result["after"], result["before"])
        assert_same_bits(result["fresh_export"], result["start"])
        adapted = [name for name in result["start"] if name not in result["frozen"]]
        assert adapted
        for name in result["start"]:
            same = torch.equal(result["export"][name], result["start"][name])
            assert same == (name in result["frozen"]), name
        kinds = {name.split(".")[-2] for name in adapted}
        assert kinds == set(factors_of(BACKENDS[backend_name]))


@pytest.mark.parametrize("world", [2, 1])
def test_training_is_that_of_peft(runs: Results, folder: Path, world: int) -> None:
    want = trained_by_hand(folder / "model", folder / str(world) / "fresh")
    got = joined(runs[world], "after")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 1])
def test_what_is_saved_loads_in_peft_and_merged_in_transformers(
    runs: Results, folder: Path, world: int
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, folder / str(world) / "adapter").eval()
    want = joined(runs[world], "after")
    torch.testing.assert_close(scored_by_hand(with_adapter), want, atol=1e-5, rtol=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(folder / str(world) / "merged")
    torch.testing.assert_close(scored_by_hand(whole), want, atol=1e-5, rtol=1e-5)
    files = {path.name for path in (folder / str(world) / "adapter").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files


@pytest.mark.parametrize("world", [2, 1])
def test_engines_get_merged_weights_in_parts(runs: Results, world: int) -> None:
    manifest, whole = runs[world][0]["manifest"], runs[world][0]["export"]
    assert [meta.name for meta in manifest.tensors] == list(whole)
    for name, tensor in whole.items():
        parts = [result["parts"][name].flatten() for result in runs[world]]
        torch.testing.assert_close(torch.cat(parts), tensor.flatten(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("world", [2, 1])
def test_engines_that_serve_it_get_the_adapter_in_parts(
    runs: Results, folder: Path, world: int
) -> None:
    manifest = runs[world][0]["adapter_manifest"]
    saved = load_file(folder / str(world) / "adapter" / "adapter_model.safetensors")
    assert {meta.name: meta.shape for meta in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    for position, meta in enumerate(manifest.tensors):
        parts = [result["adapter_parts"][meta.name].flatten() for result in runs[world]]
        cuts = manifest.cuts_of(position)
        assert [part.numel() for part in parts] == [b - a for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), saved[meta.name].flatten())


@pytest.mark.parametrize("world", [2, 1])
def test_options_of_memory_and_speed_change_no_number(runs: Results, world: int) -> None:
    for result in runs[world]:
        for option, after in result["options"].items():
            torch.testing.assert_close(after, result["after"], atol=1e-6, rtol=1e-5, msg=option)


@pytest.mark.parametrize("world", [2, 1])
def test_factors_are_trained_in_float32_whatever_computes(
    runs: Results, folder: Path, backend_name: str, world: int
) -> None:
    fresh, low = (
        load_file(folder / str(world) / name / "adapter_model.safetensors")
        for name in ("fresh", "fresh_bf16")
    )
    if "megatron" in backend_name:  # exports what computes, and keeps masters in checkpoints
        fresh = {name: tensor.bfloat16() for name, tensor in fresh.items()}
    else:
        assert any(not torch.equal(t, t.bfloat16().float()) for t in fresh.values())
    assert_same_bits(low, fresh)
    for result in runs[world]:
        torch.testing.assert_close(result["bf16"]["after"], result["after"], atol=0.05, rtol=0)
        low_bits = result["bf16"]["export"]
        assert {tensor.dtype for tensor in low_bits.values()} == {torch.bfloat16}
        # Adam's first steps follow signs, so where a gradient is nearly zero a last bit, which
        # differs between processors, may turn a step round: measured are 0.03 of the update.
        apart = {name: tensor.float() - result["export"][name] for name, tensor in low_bits.items()}
        update = {name: result["export"][name] - result["start"][name] for name in low_bits}
        assert length(apart) < 0.06 * length(update)


def test_a_checkpoint_is_the_adapter_alone(runs: Results, folder: Path) -> None:
    for world in (2, 1):
        checkpoint = folder / str(world) / "checkpoint"
        meta = json.loads((checkpoint / "meta.json").read_text())
        assert meta["tensors"]
        assert all("lora_" in name for name in meta["tensors"])
        for path in checkpoint.rglob("*"):
            assert path.is_dir() or b"embed_tokens" not in path.read_bytes(), path


def test_a_checkpoint_resumes_on_any_number_of_ranks_with_the_same_loss(
    runs: Results, resumed_elsewhere: Results
) -> None:
    for world in (2, 1):
        for result in runs[world]:
            again = result["resumed"]["metrics"].values_by_name()
            assert again == result["next"].values_by_name()
        other = runs[3 - world]
        for result in resumed_elsewhere[world]:
            assert_same_bits(result["resumed"]["export"], other[0]["export"])
        want = Metrics.concat([result["next"] for result in leaders(other)]).values_by_name()
        resumed = [result["resumed"]["metrics"] for result in leaders(resumed_elsewhere[world])]
        got = Metrics.concat(resumed).values_by_name()
        for metric in ("loss/total", "loss/policy", "entropy", "grad_norm"):
            assert got[metric] == pytest.approx(want[metric], rel=1e-6), metric


@pytest.mark.slow
def test_first_factors_are_those_of_the_seed_on_any_number_of_ranks(
    backend_name: str, folder: Path
) -> None:
    fresh = []
    for world in (2, 1):
        target = folder / f"seeds on {world}"
        run_ranks(world, partial(seeds_job, backend_name=backend_name), target, timeout_s=200)
        fresh += [
            load_file(target / f"seed {seed}" / "adapter_model.safetensors") for seed in (1, 2)
        ]
    one, two, *others = fresh
    assert all(torch.equal(one[name], others[0][name]) for name in one)
    assert all(torch.equal(two[name], others[1][name]) for name in two)
    first = [name for name in one if "lora_A" in name]
    assert first
    assert not any(torch.equal(one[name], two[name]) for name in first)


def test_layers_that_cannot_have_factors_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "experts", experts=True)
    (found,) = run_ranks(1, refusals, tmp_path / "one", timeout_s=100)
    assert "down_proj is of routed experts only" in found["down_proj"]
    assert "gate_up_proj is no linear layer" in found["gate_up_proj"]
    assert "lm_head is the head" in found["lm_head"]
    assert "q_prj is no linear layer of qwen3_moe; it has" in found["q_prj"]
    assert all(message.startswith("model.lora") for message in found.values())


@pytest.mark.parametrize(("first", "end"), [(0, 30), (0, 3), (9, 12), (5, 23), (28, 30), (7, 7)])
def test_an_adapter_is_added_to_any_run_of_a_weight(first: int, end: int) -> None:
    factors = torch.arange(12.0).view(2, 6), torch.arange(10.0).view(5, 2)
    a_RI, b_OR = (torch.nn.Parameter(factor) for factor in factors)
    weight = torch.arange(30.0) / 7
    got = plus_adapter(weight[first:end], Delta(a_RI, b_OR, 0.5), first)
    want = weight + 0.5 * (b_OR @ a_RI).detach().flatten()
    torch.testing.assert_close(got.detach(), want[first:end])
