"""Tiny random models of every family of language models that the documentation names, and a few
more whose files differ from what transformers keeps in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from roll.config.sections.model import ModelConfig
from tests.convert.tiny_models import COMMON, MODELS
from tests.tiny import ALPHABET, SPECIAL, char_tokenizer

SIZES: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 2,
    "vocab_size": len(SPECIAL) + len(ALPHABET),
    "pad_token_id": 0,
    "attention_dropout": 0.3,
}
"""With dropout, which training must switch off."""
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LAYERS = {
    "qwen3_next": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"]},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {**settings, **_LAYERS.get(name, {})} for name, settings in MODELS.items()},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 0.7,
    },
    "granite": {"model_type": "granite"},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3"},
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.1,
        "input_jitter_noise": 0.1,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral_jitter": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.2,
    },
}
"""Settings of `AutoConfig.for_model`, beside `SIZES`."""
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_TEXT = {**SIZES, "head_dim": 8, "rope_parameters": _ROPE}
WITH_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _TEXT,
        "vision_config": {**_VISION, "embed_dim": 32},
    },
    "qwen3_vl_moe": {
        "text_config": {**_TEXT, "num_experts": 4, **_EXPERTS},
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
    },
}
"""The same of models that see."""


def make(name: str, *, factory: Any = AutoModelForCausalLM, **sizes: Any) -> PreTrainedModel:
    """In training mode, as transformers makes it; every value is random.

    Args:
        factory: auto class of a model that does not see.
        sizes: further settings of a model that does not see.
    """
    torch.manual_seed(0)
    if name in WITH_VISION:
        config = AutoConfig.for_model(name, **WITH_VISION[name])
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        settings = {**SIZES, **FAMILIES[name], **sizes}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
    return model.train()


def save(folder: Path, name: str, **options: Any) -> Path:
    """The same with a tokenizer, as a folder."""
    make(name, **options).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def config_of(folder: Path, name: str) -> ModelConfig:
    """Of what `save` wrote, with a kernel that transformers has for the family."""
    eager = name in ("gemma2", "gpt_oss")
    return ModelConfig(path=str(folder), attention="eager" if eager else "sdpa")
