"""Limits of vLLM without a GPU that depend on the model, found before vLLM starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.sections.engines import VllmConfig
from roll.core.errors import ConfigError
from roll.platform.machine import missing_for_compile

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads for which vLLM 0.32 has a kernel. Latent attention has another."""


def check_model(config: VllmConfig, model: Mapping[str, Any], dtype: str) -> None:
    """Raise ConfigError if vLLM does not serve the model without a GPU, or not with these settings.

    Args:
        model: values of the model's config.json.
        dtype: dtype of weights and activations, `float32` or `bfloat16`.
    """
    _check_type(model)
    _check_compiled(config)
    text = model.get("text_config", model)
    _check_linear_attention(config, text, dtype)
    _check_heads(text)


def check_compiler(config: VllmConfig) -> None:
    """Raise ConfigError if layers are to be compiled without a GPU, and this process cannot."""
    if not config.eager_on("cpu") and (missing := missing_for_compile(gpus=False)):
        raise ConfigError(
            f"actor_infer.strategy.enforce_eager: torch.compile cannot be used: {missing}, or "
            "leave out enforce_eager"
        )


def _check_type(model: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM does not compute models of this type as transformers does."""
    kind = str(model.get("model_type"))
    if kind in UNSERVED:
        raise ConfigError(
            f"actor_infer.strategy.kind: vllm does not serve a {kind} without a GPU: "
            f"{UNSERVED[kind]}; say hf"
        )


def _check_compiled(config: VllmConfig) -> None:
    """Raise ConfigError if layers would have to be compiled that vLLM leaves as they are."""
    if config.max_lora_rank and not config.eager_on("cpu"):
        raise ConfigError(
            "actor_infer.strategy.enforce_eager: without a GPU vLLM compiles no layers that take "
            f"adapters (max_lora_rank: {config.max_lora_rank}); leave out enforce_eager"
        )


def _check_linear_attention(config: VllmConfig, text: Mapping[str, Any], dtype: str) -> None:
    """Raise ConfigError if layers of linear attention would not compute in this dtype, or would
    have to share states between prompts.

    vLLM keeps such states where chunks of a prompt end, and asserts that prompts are cut into
    chunks. On CPUs they are not (see `compat.cpu_arguments`).
    """
    layers = text.get("layer_types") or ()
    linear = layers.count("linear_attention")
    if not linear:
        return
    have = f"{linear} of the model's {len(layers)} layers have linear attention"
    if config.prefix_caching:
        raise ConfigError(
            f"actor_infer.strategy.prefix_caching: {have}, whose states vLLM does not "
            "share between prompts without a GPU; set it to false"
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"actor_infer.dtype: {have}, which vLLM computes in bfloat16 only without a GPU, "
            f"and it is {dtype}; set it to bfloat16, or actor_infer.strategy.kind to hf"
        )


def _check_heads(text: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM has no kernel for the size of the model's attention heads."""
    if text.get("kv_lora_rank"):
        return
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    size = text.get("head_dim") or (width // heads if width and heads else None)
    for name, found in (("head_dim", size), ("global_head_dim", text.get("global_head_dim"))):
        if found is not None and found not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            raise ConfigError(
                f"actor_infer.strategy.kind: the model's {name} is {found}, and vllm has kernels "
                f"for {sizes} without a GPU; say hf"
            )


UNSERVED: Mapping[str, str] = {
    "deepseek_v3": "its log-probs (latent attention for CPUs) differ by up to 0.35 from those of "
    "transformers, before the first update as well",
    "glm4_moe_lite": "its log-probs (latent attention for CPUs) differ by up to 0.24 from those of "
    "transformers, before the first update as well",
    "glm_moe_dsa": "vLLM has no sparse attention for CPUs",
    "minimax_m2": "vLLM's choice of experts for CPUs knows softmax only, and these weigh by a "
    "sigmoid",
}
"""Reason why a model type is refused; found with vLLM 0.32."""


def cache_bytes_per_token(model: Mapping[str, Any], width: int) -> int:
    """Return the bytes that a token takes in the KV cache of all layers.

    Args:
        model: values of the model's config.json.
        width: bytes of an element.
    """
    text = model.get("text_config", model)
    if text.get("kv_lora_rank"):  # latent attention
        elements = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    else:
        heads = int(text["num_attention_heads"])
        size = int(text.get("head_dim") or text["hidden_size"] // heads)
        elements = 2 * size * int(text.get("num_key_value_heads") or heads)
    return elements * width * int(text["num_hidden_layers"])
