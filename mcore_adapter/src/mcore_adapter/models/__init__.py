"""Model families, one file each: a table of parameters and fields of Megatron-Core's config."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import UnknownModelError
from mcore_adapter.models.config import Config, completed
from mcore_adapter.models.families import (
    deepseek_v3,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    phi3,
    qwen2_moe,
    qwen3_5,
    qwen3_next,
)
from mcore_adapter.models.fields import Fields
from mcore_adapter.models.vision import qwen_vl


class Family(Protocol):
    """Interface of a family's module; both functions take a checked and completed config."""

    def table(self, config: Config, /) -> ModelTable:
        """Return the table of a model: the name, the format and the sharding of each parameter."""
        ...

    def fields(self, config: Config, /) -> Fields:
        """Return the fields of Megatron-Core's config for a model."""
        ...


FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek_v3,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "kimi_k2": deepseek_v3,
    "llama": llama,
    "minimax_m2": minimax_m2,
    "ministral3": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "phi3": phi3,
    "qwen2": llama,
    "qwen2_5_vl": qwen_vl,
    "qwen2_moe": qwen2_moe,
    "qwen2_vl": qwen_vl,
    "qwen3": llama,
    "qwen3_moe": qwen2_moe,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "seed_oss": llama,
}
"""Family of each `model_type` in a `config.json`. A new family needs a file and a line here."""


REFUSED: dict[str, str] = {
    "nemotron_h": "the Mamba 2 layers of Megatron-Core 0.16.1 need the packages mamba_ssm and "
    "causal_conv1d, which need CUDA, and a layer here has both attention and an MLP, not one of "
    "them",
}
"""Reason why there is no family for a `model_type`."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of the model that a `config.json` describes.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
    """
    found = config.get("model_type")
    if isinstance(found, str) and found in FAMILIES:
        return FAMILIES[found]
    raise UnknownModelError(
        f"config.json: model_type {found!r} is not supported{_hint(config)}; known: "
        + ", ".join(FAMILIES)
    )


def _hint(config: Mapping[str, Any]) -> str:
    """Return the reason why a model is not supported, or what may be meant instead."""
    found, text = str(config.get("model_type")), config.get("text_config")
    if found in REFUSED:
        return f": {REFUSED[found]}"
    if isinstance(text, dict) and text.get("model_type") in FAMILIES:
        return (
            f"; its language model is a {text['model_type']}, which is, if it is saved by itself, "
            "as the section Families of mcore_adapter/README.md shows"
        )
    near = get_close_matches(found, FAMILIES, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def table_of(config: Mapping[str, Any]) -> ModelTable:
    """Return the table of the model that a `config.json` describes.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
        ConfigError: a key is missing, or has an impossible value.
    """
    return family_of(config).table(completed(config))


def fields_of(config: Mapping[str, Any]) -> Fields:
    """Return the fields of Megatron-Core's config for the model that a `config.json` describes.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
        ConfigError: a key is missing, or has a value that is impossible or cannot be built.
    """
    return family_of(config).fields(completed(config))
