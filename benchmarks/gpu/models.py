"""Random models of the sizes that people train, written without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tiny import char_tokenizer

_COMMON: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SIZES: dict[str, dict[str, Any]] = {
    "0.1M": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    },
    "0.6B": _COMMON | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": _COMMON | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": _COMMON | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}  # fmt: skip
"""Name of a size -> sizes of a Qwen3; all but the first are those of the released models."""


def config_of(size: str) -> Qwen3Config:
    """Return the config of a model with a tied head."""
    return Qwen3Config(
        **SIZES[size],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )


def write_model(folder: Path, size: str) -> Path:
    """Write a model with random weights in bfloat16, a file for each layer, and a tokenizer that
    knows its first tokens."""
    config = config_of(size)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = shape
    generator = torch.Generator().manual_seed(0)
    for file, its in files.items():
        tensors = {name: _values(name, shape, generator) for name, shape in its.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, its in files.items() for name in its}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return values as transformers initialises them: norms 1, all else of deviation 0.02."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
