"""A rank that loads a model never needs much more memory than its part of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.contract.loading_job import EXPERTS, LARGE, TINY, TINY_EXPERTS, cases, job
from tests.contract.ranks import run_ranks
from tests.tiny import save_tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loading")
    save_tiny_model(made / TINY)
    save_tiny_model(made / TINY_EXPERTS, experts=True)
    large = Qwen3Config(**SIZES, intermediate_size=1536, num_hidden_layers=16)
    Qwen3ForCausalLM(large).to(torch.bfloat16).save_pretrained(made / LARGE)
    fused = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=3,
    )
    Qwen3MoeForCausalLM(fused).to(torch.bfloat16).save_pretrained(made / EXPERTS)
    return made


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, "fsdp2, trained"),
        *(
            pytest.param(ranks, case, marks=pytest.mark.slow)
            for ranks in (2, 4)
            for case in cases(ranks)
            if (ranks, case) != (2, "fsdp2, trained")
        ),
    ],
)
def test_no_rank_needs_more_than_its_shard_and_the_largest_tensor(
    folder: Path, ranks: int, case: str
) -> None:
    own = folder / f"{case} on {ranks}"
    found = run_ranks(ranks, partial(job, case=case), own, timeout_s=300)
    model, *_ = cases(ranks)[case]
    whole, largest = bytes_of(folder / model)
    bound = 1.1 * (whole / ranks + largest)
    peaks = [each["peak"] for each in found]
    assert max(peaks) <= bound, (peaks, bound)
    # By the kernel's own count, and with mapped files, which would hide that all is read.
    resident = [each["resident"] for each in found]
    assert max(resident) <= bound, (resident, bound)
    assert max(peaks) >= whole / ranks  # else the meter reads nothing


def bytes_of(folder: Path) -> tuple[int, int]:
    """Bytes of a model, and of its largest tensor in memory, float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    sizes = [4 * p.numel() for p in model.parameters()]
    return sum(sizes), max(sizes)
