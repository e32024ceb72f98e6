"""Parts of a model that sees: the tower, the projector behind it and the language model."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from roll.core.errors import ConfigError

FAMILIES = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Model types whose vision part is known: `visual`, which merges squares of patches into one token
each, beside `language_model`, which has three positions for each token."""


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a model with this config reads pictures."""
    return config.model_type in FAMILIES


def generating_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class of models that write text, for a model with this config."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model with a head that makes hidden states of token ids."""
    found = model.get_decoder() if sees(model.config) else model.base_model
    assert isinstance(found, PreTrainedModel)
    return found


def require_parts(config: PreTrainedConfig, key: str) -> None:
    """Raise ConfigError if the model has one part only.

    Args:
        key: config key that names parts, for the message.
    """
    if not sees(config):
        raise ConfigError(
            f"{key}: model type {config.model_type!r} is not divided into vision, projector and "
            f"language; {', '.join(sorted(FAMILIES))} are. Leave out `{key}`"
        )
