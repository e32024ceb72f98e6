"""Keys of a model's config that vLLM reads, but transformers keeps under other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from roll.core.errors import ConfigError


def missing_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """Return keys with values for vLLM's `hf_overrides`.

    Published configs have most of them as well; those that transformers has written do not.

    Raises:
        ConfigError: vLLM cannot compute the model.
    """
    add = _ADDED.get(config.model_type)
    keys = {} if add is None else add(config)
    return {name: value for name, value in keys.items() if not hasattr(config, name)}


def _glm4_moe_lite(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the number of layers without experts, which vLLM takes for the first ones."""
    kinds = list(config.mlp_layer_types)
    dense = kinds.count("dense")
    if kinds[dense:].count("dense"):
        raise ConfigError(
            f"mlp_layer_types of the model is {kinds}; vLLM computes models whose dense layers are "
            "the first ones"
        )
    return {"first_k_dense_replace": dense}


def _minimax_m2(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the number of rotated dimensions of a head, and how experts are chosen."""
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {
        "rotary_dim": int(config.head_dim * share),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }


def _ministral3(config: PreTrainedConfig) -> dict[str, Any]:
    """Return how queries grow with the position. vLLM leaves it out where the key is missing."""
    rope = config.rope_parameters
    if "llama_4_scaling_beta" not in rope:
        return {}
    return {
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
    }


_ADDED: dict[str, Callable[[PreTrainedConfig], dict[str, Any]]] = {
    "glm4_moe_lite": _glm4_moe_lite,
    "ministral3": _ministral3,
    "minimax_m2": _minimax_m2,
}
