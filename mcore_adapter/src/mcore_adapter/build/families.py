"""What a family's `config.json` says about its layers: one map of fields per family.

The maps hold plain values; `build.config` makes a Megatron-Core config of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_adapter.errors import ConfigError, UnknownModelError
from mcore_adapter.models.common import num_experts_of, shape_of
from mcore_adapter.models.qwen2_moe import sparse_layers

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


def dense(config: Config) -> Fields:
    """llama, mistral, qwen2, qwen3, seed_oss: the fields that almost all families have."""
    shape, kind = shape_of(config), config["model_type"]
    expect(config, "mlp_bias", False, None)
    biased = bool(config.get("attention_bias", False))
    out_bias = bool(config.get("attention_out_bias", biased and kind != "qwen2"))
    return Fields(
        config={
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.num_heads,
            "num_query_groups": shape.num_kv_heads,
            "kv_channels": shape.head_dim,
            "ffn_hidden_size": config["intermediate_size"],
            "layernorm_epsilon": config["rms_norm_eps"],
            "init_method_std": config.get("initializer_range", 0.02),
            "activation_func": config["hidden_act"],
            "add_qkv_bias": biased or kind == "qwen2",
            "qk_layernorm": kind == "qwen3",
            **windows(config),
        },
        rope_width=shape.head_dim,
        out_bias=out_bias,
    )


def mixtral(config: Config) -> Fields:
    """Every layer has experts; the chosen ones' probabilities add up to one."""
    return with_experts(
        dense(config),
        experts=num_experts_of(config),
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )


def qwen_moe(config: Config) -> Fields:
    """qwen2_moe, qwen3_moe: some layers have experts, qwen2_moe has one that all tokens visit."""
    second, base = config["model_type"] == "qwen2_moe", dense(config)
    biased = bool(config.get("qkv_bias", True) if second else config.get("attention_bias", False))
    values = {**base.config, "add_qkv_bias": biased, "qk_layernorm": not second}
    sparse = sparse_layers(config)
    shared: dict[str, Any] = {}
    if second:
        shared = {
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    return with_experts(
        Fields(config=values, rope_width=base.rope_width, out_bias=biased and not second),
        experts=num_experts_of(config),
        width=config["moe_intermediate_size"],
        topk=config["num_experts_per_tok"],
        sparse=[layer in sparse for layer in range(config["num_hidden_layers"])],
        # Megatron-Core names the order of softmax and choice; to choose first is to normalise.
        moe_router_pre_softmax=not config.get("norm_topk_prob", False),
        **shared,
    )


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


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "llama": dense,
    "mistral": dense,
    "mixtral": mixtral,
    "qwen2": dense,
    "qwen2_moe": qwen_moe,
    "qwen3": dense,
    "qwen3_moe": qwen_moe,
    "seed_oss": dense,
}
"""`model_type` in a `config.json` to its map."""


def fields_of(config: Config) -> Fields:
    """
    Raises:
        UnknownModelError: there is no map for its `model_type`.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnknownModelError(
            f"config.json: models of type {kind!r} cannot be built, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind](config)
