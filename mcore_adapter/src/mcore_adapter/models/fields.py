"""What a family's `config.json` says about its layers, as fields of Megatron-Core's config.

The functions that make them stand beside the tables of the families. They hold plain values, so
that conversion needs no torch; `build.config` makes a Megatron-Core config of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_adapter.errors import ConfigError
from mcore_adapter.models.config import Config


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What grouped-query attention has: said once by a family, for its table and its fields."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    """A gate for every head of queries."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Arguments of Megatron-Core's config, and what it has no field for."""

    config: dict[str, Any]
    latent: bool = False
    """Multi-head latent attention."""
    rope_width: int
    """Of a head, the part that may be rotated."""
    out_bias: bool = False
    """The output projection of attention has a bias, and the MLP has none."""


def with_experts(
    base: Fields,
    *,
    experts: int,
    width: int,
    topk: int,
    sparse: list[bool] | None = None,
    **more: Any,
) -> Fields:
    """Adds experts to the layers that `sparse` names, all by default."""
    layers = sparse if sparse is not None else [True] * base.config["num_layers"]
    return Fields(
        config={
            **base.config,
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": width,
            "moe_router_topk": topk,
            "moe_layer_freq": [int(layer) for layer in layers],
            **more,
        },
        latent=base.latent,
        rope_width=base.rope_width,
        out_bias=base.out_bias,
    )


def windows(config: Config) -> dict[str, Any]:
    """Sliding windows: of all layers, or of those that `layer_types` names or stands for."""
    kind, size = config["model_type"], config.get("sliding_window")
    # A llama has none, whatever its `config.json` says.
    if kind not in _WINDOWED:
        return {}
    everywhere = kind in ("mistral", "mixtral", "qwen3_moe")
    kinds = [] if everywhere else _layer_kinds(config)
    # Types without the switch have it on.
    if not size or not config.get("use_sliding_window", True):
        return {}
    # The width counts the token itself, Megatron-Core's counts those before it.
    found: dict[str, Any] = {"window_size": (size - 1, 0)}
    if not everywhere:
        found["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    return found


def _layer_kinds(config: Config) -> list[str]:
    """`layer_types`, or what transformers takes where it is missing.

    Raises:
        ConfigError: a layer is of another kind than full or sliding attention.
    """
    kinds: list[str] | None = config["layer_types"]
    if kinds is None:
        return [
            "sliding_attention" if _windowed(config, layer) else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ConfigError(f"config.json: layer_types {unknown} are not supported")
    return kinds


_WINDOWED = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss")


def _windowed(config: Config, layer: int) -> bool:
    """Where `layer_types` is missing."""
    kind = config["model_type"]
    if kind == "gpt_oss":
        return layer % 2 == 0
    if kind == "qwen2_moe":
        return layer % 2 == 0 and layer < (config["max_window_layers"] or 0)
    return layer >= (config["max_window_layers"] or 0)


class RopeParameters(dict[str, Any]):
    """What frequencies follow from."""

    def __missing__(self, name: str) -> Any:
        raise ConfigError(
            f"config.json: rope_parameters of type {self['rope_type']} lack {name}; add it"
        )


def rope_parameters(config: Config) -> RopeParameters:
    """`rope_parameters`; older configs say `rope_theta` and `rope_scaling`, which goes first."""
    found = RopeParameters(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", config["rope_theta"])
    return found


def expect(config: Config, name: str, *allowed: object) -> None:
    """
    Raises:
        ConfigError: the value is there and is none of those that can be built.
    """
    found = config[name]
    if found not in allowed:
        raise ConfigError(
            f"config.json: {name} is {found!r}, which cannot be built; expected one of {allowed}"
        )
