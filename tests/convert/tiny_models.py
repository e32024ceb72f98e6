"""Tiny random Hugging Face models, and what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_adapter.convert.conversion_plan import HfRef
from mcore_adapter.load import HfTensors

VOCAB = 67
"""Odd, so that it is padded under tensor parallelism."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
    # A token that is in the rows: its embedding gets no gradient there.
    "pad_token_id": 5,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama_biased_tied": {
        "model_type": "llama",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 12, "residual_dropout": 0.0},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **DELTA_NET,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        **DELTA_NET,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "index_topk": 5,
        "index_head_dim": 10,
        "index_n_heads": 3,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 12,
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "query_pre_attn_scalar": 9,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 0.7,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    },
    "gemma4": {
        "model_type": "gemma4_text",
        # Attention has no scale: with wide heads it would be so sharp that rounding is large.
        "head_dim": 4,
        "global_head_dim": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 0.7,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3_tied": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
}
LOOSE = {"qwen3_next": 1e-5, "qwen3_5": 1e-5, "qwen3_5_moe": 3e-5, "gemma4": 1e-5}
"""Largest differences of gradients for some models, by name; 1e-6 for the others.

Gradients of delta nets are sums over all positions of products of decays, and attention without a
scale (gemma4) is sharp."""


def save_model(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, **changed: Any
) -> Path:
    """A Hugging Face folder with random weights; norms and biases are random too.

    Args:
        changed: values of the config that replace those of the model.
    """
    torch.manual_seed(0)
    made = {**COMMON, **MODELS[name], **changed}
    config = AutoConfig.for_model(made.pop("model_type"), **made)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for label, buffer in model.named_buffers():
            if "correction_bias" in label:
                buffer.normal_(std=0.2)
            if "layer_scalar" in label:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder / name)
    return folder / name


def rows(count: int = 4, length: int = 12) -> Tensor:
    """Tokens [count, length]."""
    return torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(3))


def targets(tokens_BT: Tensor) -> Tensor:
    """The token after each; the last one's is arbitrary and counts."""
    return tokens_BT.roll(-1, dims=1)


def save_reference(folder: Path, tokens_BT: Tensor) -> None:
    """Logits, mean negative log-likelihood and its gradients, by Hugging Face in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    logits = model(input_ids=tokens_BT, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets(tokens_BT).flatten())
    loss.backward()
    buffers = {name: torch.zeros_like(buffer) for name, buffer in model.named_buffers()}
    buffers |= {n.replace(".mlp.", ".block_sparse_moe."): b.clone() for n, b in buffers.items()}
    # What Hugging Face computes without gradients counts as a buffer.
    buffers |= {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.grad is None}
    save_file({"logits": logits.detach(), "loss": loss.detach()}, folder / "outputs.st")
    save_file(buffers, folder / "buffers.st")
    # Saved as if they were weights: names in a checkpoint are not those of the modules.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")


@dataclass(frozen=True)
class Reference:
    """What Hugging Face computes."""

    logits_BTV: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def read_reference(folder: Path) -> Reference:
    outputs, buffers = load_file(folder / "outputs.st"), load_file(folder / "buffers.st")
    with HfTensors(folder / "gradients") as saved:
        gradients = {name: saved.read(HfRef(name)) for name in saved.names - set(buffers)}
    return Reference(outputs["logits"], outputs["loss"], gradients)
