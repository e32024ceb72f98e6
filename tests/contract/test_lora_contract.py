"""Adapters on a training backend, on one rank and on two; PEFT by itself is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contract.lora_job import job, scored_by_hand, trained_by_hand
from tests.contract.ranks import run_ranks
from tests.contract.test_train_contract import assert_same_bits
from tests.tiny import save_tiny_model

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_tiny_model(folder / "model", tied=False, seed=1)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Results:
    return {world: run_ranks(world, job, folder / str(world), timeout_s=200) for world in (2, 1)}


def joined(ranks: list[dict[str, Any]], name: str) -> Tensor:
    parts = [result[name] for result in ranks]
    assert all(isinstance(part, Tensor) for part in parts)
    return torch.cat(parts)


@pytest.mark.parametrize("world", [2, 1])
def test_a_fresh_adapter_changes_nothing_and_its_base_stays(runs: Results, world: int) -> None:
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
        assert kinds == {"q_proj", "v_proj", "o_proj", "down_proj"}


@pytest.mark.parametrize("world", [2, 1])
def test_training_is_that_of_peft(runs: Results, folder: Path, world: int) -> None:
    _, want = trained_by_hand(folder / "model")
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


def test_a_checkpoint_is_the_adapter_alone_and_resumes_on_any_number_of_ranks(
    runs: Results, folder: Path
) -> None:
    for world in (2, 1):
        meta = json.loads((folder / str(world) / "checkpoint" / "meta.json").read_text())
        assert meta["tensors"]
        assert all("lora_" in name for name in meta["tensors"])
        for result in runs[world]:
            assert result["resumed"] == result["next"]
    assert_same_bits(runs[1][0]["from_two_ranks"], runs[2][0]["export"])
