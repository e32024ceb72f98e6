"""Operations of passes: what the config says, against what PyTorch counts while it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from roll.config.sections.model import LoraConfig, ModelConfig
from roll.core.batches import TokenBatch, TrainBatch
from roll.models import flops
from roll.models.flops import ModelFlops, counted, flops_of
from roll.models.trained import select_trained
from roll.platform.peaks import peak_tflops
from roll.workers.work import WorkMeter
from tests.families import FAMILIES, make, save

ROWS, LENGTH = 2, 24
LENGTHS = torch.full((ROWS,), LENGTH)
TOKENS = ROWS * LENGTH
KNOWN = sorted(name for name, own in FAMILIES.items() if own["model_type"] in flops.FAMILIES)


def eager(name: str, **sizes: Any) -> PreTrainedModel:
    """With kernels whose operations PyTorch counts, and windows that hold a whole row, because
    kernels in plain PyTorch compute with masked tokens, too."""
    model = make(name, **sizes)
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 2 * LENGTH
    return model


def computed(model: PreTrainedModel, *, trains: bool) -> int:
    tokens_BT = torch.randint(3, 20, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trains):
        logits = model(tokens_BT, use_cache=False).logits
        if trains:
            logits.sum().backward()
    return counter.get_total_flops()


def test_every_family_that_is_counted_is_tried() -> None:
    assert {FAMILIES[name]["model_type"] for name in KNOWN} == flops.FAMILIES


@pytest.mark.parametrize("name", KNOWN)
def test_operations_are_those_that_pytorch_counts(name: str) -> None:
    model = eager(name)
    found = counted(model, trains=True, writes=True)
    for trains, count in ((False, found.forward), (True, found.update)):
        expected = computed(model, trains=trains)
        assert count(LENGTHS, TOKENS) == pytest.approx(expected, rel=0.001), (name, trains)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": LoraConfig(rank=1)},
        {"lora": LoraConfig(rank=1, targets=("q_proj", "down_proj"))},
        {"freeze": ("model.embed_tokens.*", "model.layers.[0-2].*")},
        {"freeze": ("lm_head.weight", "*mlp*")},
    ],
    ids=["all-linear", "some", "layers", "parts"],
)
def test_frozen_weights_have_no_gradients(settings: dict[str, Any]) -> None:
    model = eager("llama", num_hidden_layers=6)
    whole = counted(model, trains=True, writes=True)
    config = ModelConfig(path="none", **settings)
    select_trained(model, config, trainable=True, new_head=None, seed=0)
    found = counted(model, trains=True, writes=True)
    expected = computed(model, trains=True)
    # The first layer that learns also needs no gradients of its input, which are not left out.
    assert found.update(LENGTHS, TOKENS) == pytest.approx(expected, rel=0.03)
    assert found.update(LENGTHS, TOKENS) < 0.9 * whole.update(LENGTHS, TOKENS)


def test_a_big_model_is_counted_as_by_hand() -> None:
    """Attention of a row is quadratic in its length, windows cut it, and padding is nothing."""
    found = ModelFlops(100, 100, 100, 10, True, (flops.Attention(2, 8), flops.Attention(1, 8, 3)))
    lengths = torch.tensor([4, 2])
    by_hand = 2 * (100 * 6 + 10 * 5) + 2 * 2 * 8 * (16 + 4) + 2 * 1 * 8 * (12 + 4)
    assert found.forward(lengths, 5) == by_hand
    assert found.update(lengths, 5) == 3 * by_hand


def test_a_meter_counts_the_rows_of_a_rank_and_nothing_random_changes(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save(tmp_path / "model", "qwen3")), lora=LoraConfig(rank=2))
    meter = WorkMeter(config, trains=True)
    tokens, lengths = torch.ones(2, 6, dtype=torch.long), torch.tensor([6, 3])
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    trained = TrainBatch(tokens=tokens, lengths=lengths, loss_mask=mask)
    before = torch.get_rng_state()
    with meter.noted("score", TokenBatch(tokens=tokens, lengths=lengths)):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    with meter.noted("train", trained):
        pass
    with meter.noted("train", trained, counts=False):
        pass
    expected = flops_of(config, trains=True, writes=True)
    assert expected is not None
    score, train = meter.take()
    assert (score.kind, score.flops) == ("score", expected.forward(lengths, 9))
    assert (train.kind, train.flops) == ("train", expected.update(lengths, 2))
    assert (train.dtype, train.device) == ("float32", None)
    assert meter.take() == []


@pytest.mark.parametrize("name", ["qwen3_next", "glm_moe_dsa", "gemma4", "qwen2_vl"])
def test_of_other_families_nothing_is_made_up(tmp_path: Path, name: str) -> None:
    config = ModelConfig(path=str(save(tmp_path / "model", name)))
    assert flops_of(config, trains=True, writes=True) is None
    meter = WorkMeter(config, trains=True)
    rows = TokenBatch(tokens=torch.ones(1, 2, dtype=torch.long), lengths=torch.tensor([2]))
    with meter.noted("score", rows):
        pass
    assert [work.flops for work in meter.take()] == [None]


def test_peaks_are_of_the_product_that_is_named() -> None:
    bfloat16: Callable[[str], float | None] = partial(peak_tflops, dtype="bfloat16")
    assert bfloat16("NVIDIA H100 80GB HBM3") == bfloat16("NVIDIA H200") == 989.4
    assert bfloat16("NVIDIA A100-SXM4-80GB") == bfloat16("NVIDIA A100-PCIE-40GB") == 312
    assert bfloat16("NVIDIA A100 80GB PCIe") == 312
    assert bfloat16("NVIDIA H100 PCIe") == 756
    assert bfloat16("NVIDIA H100 NVL") == 835.5
    assert bfloat16("NVIDIA L40S") == 362
    assert bfloat16("NVIDIA L40") == 181
    assert bfloat16("NVIDIA B200") == 2250
    assert bfloat16("NVIDIA GeForce RTX 4090") == 165.2
    assert peak_tflops("NVIDIA H200", "float32") == 66.9
    assert peak_tflops("NVIDIA H200", "tfloat32") is None
    assert peak_tflops("Tesla V100-SXM2-32GB", "float32") == 15.7
    others = (
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "Tesla V100-SXM2-32GB",
        "NVIDIA T1000",
    )
    assert [bfloat16(name) for name in others] == [None] * 5
