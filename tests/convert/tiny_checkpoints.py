"""Tiny random checkpoints, written by transformers or by hand, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.hf_classes import config_of, model_of, name_type

ALONE = Settings(workers=1)
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16},
    "llama with all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral"},
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "pad_token_id": None},
    "glm4": {"model_type": "glm4", "head_dim": 8, "pad_token_id": None},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 16, "attention_bias": True},
    "gemma4_text": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 12,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text with all projections": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 12,
        "hidden_size_per_layer_input": 0,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
        **EXPERTS,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2, **EXPERTS},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 8},
    "qwen2_vl": {"model_type": "qwen2_vl"},
    "qwen2_vl tied": {"model_type": "qwen2_vl", "tie_word_embeddings": True},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl"},
    "qwen3_vl": {"model_type": "qwen3_vl", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "head_dim": 8, "num_experts": 4, **EXPERTS},
    "deepseek_v3": {"model_type": "deepseek_v3", "q_lora_rank": 12, **LATENT, **EXPERTS},
    "deepseek_v3 without narrow queries": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        **LATENT,
        **EXPERTS,
    },
    "kimi_k2": {"model_type": "kimi_k2", "q_lora_rank": 12, **LATENT, **EXPERTS},
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 12,
        "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
        **LATENT,
        **EXPERTS,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "q_lora_rank": 12,
        "index_topk": 4,
        "index_head_dim": 6,
        "index_n_heads": 2,
        "indexer_types": ["full", "full", "shared", "full"],
        **LATENT,
        **EXPERTS,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "use_qk_norm": True,
        "attention_bias": True,
        **EXPERTS,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **LINEAR,
        **EXPERTS,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **LINEAR},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **LINEAR,
        **EXPERTS,
    },
}


def by_transformers(folder: Path, family: str) -> Path:
    """A checkpoint that `save_pretrained` wrote, where every value differs from its neighbours."""
    values = {**COMMON, **FAMILIES[family]}
    kind = values.pop("model_type")
    model = model_of(config_of(kind, values))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    model.save_pretrained(folder)
    name_type(folder, kind)
    return folder


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rewrite(src: Path, dst: Path, tensors: Mapping[str, Tensor], **changed: Any) -> Path:
    """The configuration of another checkpoint, some values changed, with other tensors."""
    config = json.loads((src / "config.json").read_text())
    return write(dst, {**config, **changed}, tensors)


def shapes_by_hand(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama, qwen3 or qwen3_moe, from their papers rather than our tables."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width, groups = config["head_dim"], config["num_key_value_heads"]
    found = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found[at + "input_layernorm.weight"] = (hidden,)
        found[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            found[f"{at}self_attn.{name}_proj.weight"] = (count * width, hidden)
            if config.get("attention_bias"):
                found[f"{at}self_attn.{name}_proj.bias"] = (count * width,)
            if name != "v" and config["model_type"] != "llama":
                found[f"{at}self_attn.{name}_norm.weight"] = (width,)
        found[at + "self_attn.o_proj.weight"] = (hidden, heads * width)
        if config.get("attention_bias"):
            found[at + "self_attn.o_proj.bias"] = (hidden,)
        experts, mlp = config.get("num_experts", 0), config["intermediate_size"]
        mlp = config["moe_intermediate_size"] if experts else mlp
        if experts:
            found[at + "mlp.gate.weight"] = (experts, hidden)
        for prefix in [f"mlp.experts.{e}." for e in range(experts)] or ["mlp."]:
            found[f"{at}{prefix}gate_proj.weight"] = (mlp, hidden)
            found[f"{at}{prefix}up_proj.weight"] = (mlp, hidden)
            found[f"{at}{prefix}down_proj.weight"] = (hidden, mlp)
    return found


def numbered(folder: Path, config: Mapping[str, Any]) -> Path:
    """A checkpoint in which every element has a number of its own, from 1."""
    tensors, at = {}, 1
    for name, shape in shapes_by_hand(config).items():
        count = int(np.prod(shape))
        tensors[name] = torch.arange(at, at + count, dtype=torch.int32).reshape(shape)
        at += count
    return write(folder, config, tensors)


def contents(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by file for Megatron layouts, as the safetensors library reads."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        prefix = "" if file.name.startswith(("model", "adapter")) else f"{file.name}:"
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                found[prefix + name] = opened.get_tensor(name)
    return found


def assert_same(one: Path, other: Path) -> None:
    """The same tensors, byte for byte."""
    ours, theirs = contents(one), contents(other)
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert tensor.numpy(force=True).tobytes() == theirs[name].numpy(force=True).tobytes(), name


def there_and_back(src: Path, folder: Path, sizes: ParallelSizes) -> Path:
    """Converts to `folder/mcore` and back to `folder/back`, which is returned."""
    commands.to_mcore(src, folder / "mcore", sizes, ALONE)
    commands.to_hf(folder / "mcore", folder / "back", ALONE)
    return folder / "back"
