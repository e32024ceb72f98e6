"""The attention kernel that a Hugging Face model is loaded with."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError

_WINDOW_IN_MASK = ("phimoe", "qwen2_moe")
"""Model types whose window of attention stands in the mask alone."""
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
        ConfigError: the model's attention is more than the kernel computes.
    """
    kernel = "sdpa" if model.attention == "auto" else model.attention
    if kernel == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        chosen = "" if model.attention == "sdpa" else " (which auto comes to)"
        raise ConfigError(
            f"model.attention: sdpa{chosen} leaves out the bound of a {config.model_type}'s "
            "attention (attn_logit_softcapping); set it to eager or flash_attention_2"
        )
    if kernel in FLASH and (window := window_in_mask(config)) is not None:
        raise ConfigError(
            f"model.attention: {kernel} leaves out the window of {window} tokens of a "
            f"{config.model_type}, which transformers writes into a mask only; set it to sdpa"
        )
    return kernel


def window_in_mask(config: PreTrainedConfig) -> int | None:
    """Return the window of attention, in tokens, that transformers writes into the mask and gives
    to no kernel: FlashAttention, which gets no mask, would compute attention without it. None if
    there is no such window, or rows are never longer.

    Args:
        config: the model's own config.
    """
    text = config.get_text_config()
    if text.model_type not in _WINDOW_IN_MASK:
        return None
    if "sliding_attention" not in (getattr(text, "layer_types", None) or ("sliding_attention",)):
        return None
    window: int | None = text.sliding_window
    return window if window and window < text.max_position_embeddings else None


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
