"""What a family's `config.json` says about its layers, as fields of Megatron-Core's config.

The functions that make them stand beside the tables of the families. They hold plain values, so
that conversion needs no torch; `build.config` makes a Megatron-Core config of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_adapter.errors import ConfigError

Config = Mapping[str, Any]


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
    """Sliding windows: of all layers (mistral) or of those that `layer_types` names."""
    size = config.get("sliding_window")
    if size is None or not config.get("use_sliding_window", True):
        return {}
    kinds = config.get("layer_types")
    if kinds is None and config["model_type"] not in ("mistral", "mixtral"):
        first = config.get("max_window_layers", 0)
        kinds = [
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    # The width counts the token itself, Megatron-Core's counts those before it.
    found: dict[str, Any] = {"window_size": (size - 1, 0)}
    if kinds is not None:
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown:
            raise ConfigError(f"config.json: layer_types {unknown} are not supported")
        found["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in kinds]
    return found


def rope_parameters(config: Config) -> dict[str, Any]:
    """`rope_parameters`; older configs say `rope_theta` and `rope_scaling`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return found


def expect(config: Config, name: str, *allowed: object) -> None:
    """
    Raises:
        ConfigError: the value is there and is none of those that can be built.
    """
    found = config.get(name, allowed[0])
    if found not in allowed:
        raise ConfigError(
            f"config.json: {name} is {found!r}, which cannot be built; expected one of {allowed}"
        )
