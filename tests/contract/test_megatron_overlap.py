"""Gradients that are reduced in the backward pass are those that are reduced after it, and weights
that are gathered in the next forward pass those that are gathered at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.contract.overlap_job import FROZEN, LORA, Case, job
from tests.contract.ranks import run_ranks
from tests.tiny import char_tokenizer, tiny_qwen3, tiny_qwen3_moe

ZERO = {"distributed_optimizer": True}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "dp, recomputed": Case({**ZERO, "recompute": "full"}),
        "dp, frozen": Case({}, packing=True, model_options=FROZEN),
        "adapter": Case(ZERO, model_options=LORA),
        "cp": Case({"cp": 2, **ZERO}),
        "pp, frozen": Case({"pp": 2}, model_options=FROZEN),
        "vpp, adapter": Case({"pp": 2, "vpp": 2}, model_options=LORA),
        "ep": Case({"ep": 2, **ZERO}, model="experts"),
    },
    4: {
        "vpp": Case({"pp": 2, "vpp": 2, **ZERO}, packing=True),
        "pp, ep": Case({"pp": 2, "ep": 2}, model="experts"),
        "tp, ep, bf16": Case(
            {"tp": 2, "ep": 2, "etp": 1, **ZERO},
            model="experts",
            model_options={"dtype": "bfloat16"},
        ),
    },
}
RUNS = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("overlap")
    for name, make in (("dense", tiny_qwen3), ("experts", tiny_qwen3_moe)):
        torch.manual_seed(0)
        make(layers=4).save_pretrained(folder / name)
        char_tokenizer().save_pretrained(folder / name)
    return {
        ranks: run_ranks(ranks, partial(job, cases=cases), folder / str(ranks), timeout_s=250)
        for ranks, cases in CASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_updates_are_those_without_the_overlap_to_the_bit(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    for rank in runs[ranks]:
        after, *meanwhile = rank[name]
        assert after["metrics"][1]["grad_norm"] > 0
        for one in meanwhile:
            assert one["metrics"] == after["metrics"]
            assert one["scores"][1].equal(after["scores"][1])
            for key, weight in after["weights"].items():
                assert torch.equal(one["weights"][key], weight), key


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_an_update_leaves_weights_to_the_next_pass_and_whatever_reads_them_gathers_them(
    runs: dict[int, list[dict[str, Any]]], ranks: int, name: str
) -> None:
    for rank in runs[ranks]:
        _, _, *gathered = rank[name]
        for one in gathered:
            assert min(one["pending"]) > 0
            assert one["left"] == 0
