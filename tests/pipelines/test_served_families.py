"""Families beyond the usual tiny model: vLLM generates with what FSDP2 has trained, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import make
from tests.runs import run_local, write_task
from tests.tiny import char_tokenizer

SERVED: dict[str, dict[str, Any]] = {
    "ministral3": {"hidden_size": 64, "head_dim": 32},
}
"""Sizes that vLLM can compute without a GPU, beside those of the family."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_vllm_generates_with_what_fsdp2_has_trained(tmp_path: Path, name: str) -> None:
    path = write_task(
        tmp_path,
        actor_train={"pool": "all", "strategy": {"kind": "fsdp2"}, "optimizer": {"lr": 1e-2}},
        actor_infer={"pool": "all", "strategy": {"kind": "vllm"}},
        track={"tensorboard": False, "verify_weights": "always"},
        reference=None,
        algorithm={},
        validation={},
        max_steps=2,
    )
    save_decided(tmp_path / "model", name)
    steps = [r for r in run_local(path) if "mismatch/logprob_abs_max" in r]
    assert len(steps) == 2
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in steps)
    assert all(record["entropy"] < 4 for record in steps)
    assert all(record["grad_norm"] > 0 for record in steps)


def save_decided(folder: Path, name: str) -> None:
    """A model whose next token depends on all that it computes: norms shrink nothing."""
    model = make(name, **SERVED[name])
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "norm" in label:
                parameter.add_(1.0)
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
