"""Rotary position frequencies of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_adapter.errors import ConfigError
from mcore_adapter.models.config import Config
from mcore_adapter.models.fields import rope_parameters, yarn_mscale


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of a model."""

    inverse_frequencies: Tensor
    """Angles per position, in radians, float32 `[rotated width / 2]`."""
    scale: float = 1.0
    """Factor by which cosines and sines are multiplied (yarn)."""

    def set_scale(self, config: TransformerConfig) -> None:
        """Let attention with this config multiply cosines and sines by `scale`.

        Attention computes the scale from three values, as a quotient of `0.1 * mscale * ln(factor)
        + 1` for two values of `mscale`. With one value it would be 1 for each scale below 1.
        """
        values = {"rotary_scaling_factor": math.exp(10.0), "mscale": self.scale - 1.0}
        for name, value in {**values, "mscale_all_dim": 0.0}.items():
            setattr(config, f"yarn_{name}", value)


def rope_of(config: Config, width: int, kind: str = "full_attention") -> Rope:
    """Compute the rotary frequencies of a model, changed for long contexts as `rope_type` says.

    Args:
        config: the model's `config.json`.
        width: number of dimensions of a head that can be rotated; multiplied by
            `partial_rotary_factor` if the config has one.
        kind: kind of the layers, for models whose kinds of layers have frequencies of their own.

    Raises:
        ConfigError: `rope_type` is not one of default, linear, llama3, yarn, or a value that it
            needs is missing.
    """
    values = rope_parameters(config, kind)
    method, base = values["rope_type"], float(values["rope_theta"])
    factor = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if method == "proportional":
        return Rope(_proportional(width, base, factor) / values.get("factor", 1.0))
    width = int(width * factor)
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if method == "default":
        return Rope(plain)
    if method == "linear":
        return Rope(plain / values["factor"])
    if method == "llama3":
        return Rope(_llama3(plain, values))
    if method == "yarn":
        return _yarn(plain, width, base, values, config["max_position_embeddings"])
    raise ConfigError(
        f"config.json: rope_type {method!r} is not supported, expected default, linear, llama3 or "
        "yarn; the others change with the length of a sequence"
    )


def _proportional(width: int, base: float, share: float) -> Tensor:
    """Return the frequencies of a head of which only a share is rotated, zeros for the rest
    (gemma4). They are those of a head that is rotated as a whole."""
    turned = int(share * width // 2)
    plain = 1.0 / base ** (torch.arange(0, 2 * turned, 2, dtype=torch.float32) / width)
    return torch.cat((plain, torch.zeros(width // 2 - turned)))


def _llama3(plain: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Stretch long waves, keep short ones, and blend both for waves in between (llama3).

    `plain` are the frequencies for `rope_type` default; `values` are the rope parameters.
    ConfigError if one is missing.
    """
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    old_length, factor = values["original_max_position_embeddings"], values["factor"]
    wave = 2 * math.pi / plain
    blend = (old_length / wave - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wave > old_length / low, plain / factor, plain)
    between = (wave >= old_length / high) & (wave <= old_length / low)
    return torch.where(between, blended, stretched)


def _yarn(plain: Tensor, width: int, base: float, values: Mapping[str, Any], longest: int) -> Rope:
    """Compute frequencies and scale by yarn (https://arxiv.org/abs/2309.00071).

    Defaults and corner cases are those of transformers.

    Args:
        plain: frequencies for `rope_type` default.
        width: number of rotated dimensions of a head.
        base: value of `rope_theta`.
        values: rope parameters of the config.
        longest: value of `max_position_embeddings`.
    """
    old_length = values.get("original_max_position_embeddings") or longest
    factor = values.get("factor") or longest / old_length
    scale = values.get("attention_factor")
    if scale is None:
        ratio, all_dims = values.get("mscale"), values.get("mscale_all_dim")
        if ratio and all_dims:
            scale = yarn_mscale(factor, ratio) / yarn_mscale(factor, all_dims)
        else:
            scale = yarn_mscale(factor)

    def dim_of(rotations: float) -> float:
        return width * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(values.get("beta_fast") or 32), dim_of(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return Rope(plain / factor * (1 - kept) + plain * kept, float(scale))
