"""LoRA on Hugging Face models in a few lines of PyTorch, and adapters as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.convert.hf_classes import loaded

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK
PREFIX = "base_model.model."


class Adapted(nn.Module):
    """y = W x + alpha / r * B A x (arXiv 2106.09685)."""

    A: nn.Parameter
    B: nn.Parameter

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        for name, shape in (("A", (RANK, base.in_features)), ("B", (base.out_features, RANK))):
            factor = torch.randn(shape, generator=generator) * 0.1
            self.register_parameter(name, nn.Parameter(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * F.linear(F.linear(x, self.A), self.B)


def adapted(folder: Path, targets: Sequence[str]) -> tuple[Any, dict[str, nn.Parameter]]:
    """The frozen model of a folder with random factors, and these under their names in PEFT."""
    model = loaded(folder, dtype=torch.float32).train()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    factors: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.split(".")[-1] in targets:
            parent, _, leaf = name.rpartition(".")
            made = Adapted(module, generator)
            setattr(model.get_submodule(parent), leaf, made)
            factors[f"{PREFIX}{name}.lora_A.weight"] = made.A
            factors[f"{PREFIX}{name}.lora_B.weight"] = made.B
    return model, factors


def save_adapter(folder: Path, factors: dict[str, nn.Parameter], targets: Sequence[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: factor.detach().clone() for name, factor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load_adapter_into(factors: dict[str, nn.Parameter], folder: Path) -> None:
    """All factors, and no others."""
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == factors.keys()
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_(found[name])
