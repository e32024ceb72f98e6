"""The attention kernel that a Hugging Face model is loaded with."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError

FLASH = ("flash_attention_2", "flash_attention_3")
"""Kernels of Dao-AILab's packages, which read the borders of sequences in packed rows themselves
and take no slices of rows."""


def implementation(model: ModelConfig, config: PreTrainedConfig) -> str:
    """Return the kernel under transformers' name for it.

    `auto` is chosen for a run before its workers start (`choice.py`). A tool without a run loads
    such a model with sdpa, which every device has.

    Args:
        config: the model's own config.

    Raises:
        ConfigError: the model's attention is more than sdpa computes.
    """
    kernel = "sdpa" if model.attention == "auto" else model.attention
    if kernel == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        chosen = "" if model.attention == "sdpa" else " (which auto comes to)"
        raise ConfigError(
            f"model.attention: sdpa{chosen} leaves out the bound of a {config.model_type}'s "
            "attention (attn_logit_softcapping); set it to eager or flash_attention_2"
        )
    return kernel


def on_any_device(config: PreTrainedConfig) -> str:
    """Return the kernel that computes a model's attention without a package of GPUs.

    Args:
        config: the model's own config.
    """
    made = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    made = made or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    bounded = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    lacking = made is not None and not made._supports_sdpa
    return "eager" if bounded or lacking else "sdpa"
