"""Inputs of layers in host memory: they leave the device, and no number changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from roll.models.parts.host_inputs import ON_DEVICE
from tests.contract.host_inputs_job import LAYERS, LORA, SEEING, Case, job
from tests.contract.ranks import run_ranks
from tests.tiny import char_tokenizer, tiny_qwen3, tiny_qwen3_moe
from tests.vision_models import save_vision_model

PACKED = {"packing": True}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "packed, adapter": Case("fsdp2", options=PACKED, model_options={"lora": LORA}),
        "frozen layers": Case("fsdp2", model_options={"freeze": ("model.layers.[01].*",)}),
        "zero2, bf16": Case("deepspeed-zero2", options=PACKED, model_options={"dtype": "bfloat16"}),
        "pictures": Case("fsdp2", model=SEEING, options={"budget": 100}),
    },
    2: {
        "cpu_offload": Case("fsdp2", options={"cpu_offload": True}),
        "ulysses, adapter": Case("fsdp2-ulysses2", options=PACKED, model_options={"lora": LORA}),
        "tp": Case("fsdp2-tp2"),
        "ep": Case("fsdp2-ep2", model="experts"),
        "zero3": Case("deepspeed-zero3"),
        "pictures": Case("deepspeed-zero3", model=SEEING, options=PACKED),
    },
}
RUNS = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("host_inputs")
    for name, make in (("dense", tiny_qwen3), ("experts", tiny_qwen3_moe)):
        torch.manual_seed(0)
        make(layers=LAYERS).save_pretrained(folder / name)
        char_tokenizer().save_pretrained(folder / name)
    save_vision_model(folder / SEEING, SEEING, text={"num_hidden_layers": LAYERS})
    return {
        ranks: run_ranks(ranks, partial(job, cases=cases), folder / str(ranks), timeout_s=250)
        for ranks, cases in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_updates_are_those_of_inputs_on_the_device_to_the_bit(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    for rank in runs[ranks]:
        stayed, moved = rank[name]
        assert moved["metrics"] == stayed["metrics"]
        assert stayed["metrics"][1]["grad_norm"] > 0
        for key, weight in stayed["weights"].items():
            assert torch.equal(moved["weights"][key], weight), key


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_inputs_are_gone_from_the_device_when_the_backward_pass_begins(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    for rank in runs[ranks]:
        stayed, moved = (each["alive"] for each in rank[name])
        assert len(moved) == len(stayed) > 2
        for alive, without in zip(moved, stayed, strict=True):
            assert without == [True] * LAYERS
            # Autograd holds the embeddings that an adapter's gradients end at.
            assert alive[0] == ("lora" in CASES[ranks][name].model_options)
            assert alive[1:] == [False] * (LAYERS - ON_DEVICE - 1) + [True] * ON_DEVICE
