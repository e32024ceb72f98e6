"""Limits of vLLM without a GPU that depend on the model, found before vLLM starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.config.sections.strategy import VllmConfig
from roll.core.errors import ConfigError


def check_prefix_caching(config: VllmConfig, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM would have to share states of linear attention between prompts.

    vLLM keeps such states where chunks of a prompt end, and asserts that prompts are cut into
    chunks. On CPUs they are not (see `compat.cpu_arguments`).

    Args:
        model: values of the model's config.json.
    """
    layers = model.get("text_config", model).get("layer_types") or ()
    if config.prefix_caching and "linear_attention" in layers:
        raise ConfigError(
            f"actor_infer.strategy.prefix_caching: {layers.count('linear_attention')} of the "
            f"model's {len(layers)} layers have linear attention, whose states vLLM does not "
            "share between prompts without a GPU; set it to false"
        )


def check_model_type(model: Mapping[str, Any]) -> None:
    """Raise ConfigError if vLLM does not compute models of this type as transformers does.

    Args:
        model: values of the model's config.json.
    """
    kind = str(model.get("model_type"))
    if kind in UNSERVED:
        raise ConfigError(
            f"actor_infer.strategy.kind: vllm does not serve a {kind} without a GPU: "
            f"{UNSERVED[kind]}; say hf"
        )


UNSERVED: Mapping[str, str] = {
    "glm4_moe_lite": "its log-probs (latent attention for CPUs) differ by up to 0.24 from those of "
    "transformers, before the first update as well",
    "glm_moe_dsa": "vLLM has no sparse attention for CPUs",
    "minimax_m2": "its engine ends at the first push of weights, and it is not known why",
}
"""Reason why a model type is refused; found with vLLM 0.32."""
