"""What a family's `config.json` says about its layers: one map of fields per family.

The maps hold plain values; `build.config` makes a Megatron-Core config of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_adapter.build.rope import rope_parameters
from mcore_adapter.errors import ConfigError, UnknownModelError
from mcore_adapter.models.common import num_experts_of, shape_of
from mcore_adapter.models.qwen2_moe import sparse_layers
from mcore_adapter.models.qwen3_next import linear_layers

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


def deepseek(config: Config) -> Fields:
    """deepseek_v3: latent attention, groups of experts, a correction of the router's scores."""
    # Megatron-Core rotates neighbouring pairs, and has one epsilon for all norms.
    expect(config, "rope_interleave", True)
    expect(config, "attention_bias", False)
    if config["rms_norm_eps"] != 1e-6:
        raise ConfigError(
            f"config.json: rms_norm_eps is {config['rms_norm_eps']}, expected 1e-6, which the "
            "norms of latent attention have whatever it is"
        )
    base = dense({**config, "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]})
    values = {
        **base.config,
        # Every head has keys of its own.
        "num_query_groups": config["num_attention_heads"],
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "qk_layernorm": True,
        **latent_rope(config),
    }
    latent = Fields(config=values, latent=True, rope_width=config["qk_rope_head_dim"])
    return with_corrected_experts(latent, config)


def latent_rope(config: Config) -> dict[str, Any]:
    """Latent attention computes its own frequencies of these."""
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise ConfigError(
            f"config.json: latent attention with rope_type {kind!r} cannot be built, only with "
            "default and yarn"
        )
    found: dict[str, Any] = {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    if kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return found


def glm4_moe(config: Config) -> Fields:
    """glm4_moe: deepseek_v3's experts with grouped-query attention, half of each head rotated."""
    # The output projection never has a bias, whatever `attention_bias` says.
    base = dense({**config, "attention_out_bias": False})
    values = {**base.config, "qk_layernorm": bool(config.get("use_qk_norm", False))}
    return with_corrected_experts(Fields(config=values, rope_width=base.rope_width), config)


def with_corrected_experts(base: Fields, config: Config) -> Fields:
    """Experts of deepseek_v3: sigmoid scores, chosen after a correction, in groups of experts."""
    expect(config, "norm_topk_prob", True)
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    topk = config["num_experts_per_tok"]
    grouped: dict[str, Any] = {}
    if groups > 1:
        if topk // chosen != 2:
            raise ConfigError(
                f"config.json: groups of experts are rated by their best {topk // chosen} (of "
                f"num_experts_per_tok {topk}, topk_group {chosen}), expected 2"
            )
        grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    layers, first = config["num_hidden_layers"], config["first_k_dense_replace"]
    return with_experts(
        base,
        experts=num_experts_of(config),
        width=config["moe_intermediate_size"],
        topk=topk,
        sparse=[layer >= first for layer in range(layers)],
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"]
        * config["n_shared_experts"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # The correction is a part of the checkpoint; post-training leaves it as it is.
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=config["routed_scaling_factor"],
        **grouped,
    )


def gpt_oss(config: Config) -> Fields:
    """gpt_oss: sinks, biases everywhere, clamped gates, every other layer in a window."""
    expect(config, "swiglu_alpha", 1.702)
    expect(config, "attention_bias", True)
    base = dense({**config, "attention_bias": False})
    return with_experts(
        Fields(
            config={
                **base.config,
                "add_bias_linear": True,
                "softmax_type": "learnable",
                # `hidden_act` says silu; what is computed is x * sigmoid(1.702 x).
                "activation_func": "quick_gelu",
                "activation_func_clamp_value": config.get("swiglu_limit", 7.0),
                "glu_linear_offset": 1.0,
            },
            rope_width=base.rope_width,
        ),
        experts=num_experts_of(config),
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )


def qwen3_next(config: Config) -> Fields:
    """qwen3_next: gated delta nets, every fourth layer gated attention, a quarter of heads rotated;
    routed and shared experts; norms centred on zero."""
    linear = linear_layers(config)
    base = qwen_moe({**config, "model_type": "qwen2_moe", "qkv_bias": config["attention_bias"]})
    values = {
        **base.config,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [
            int(layer in linear) for layer in range(config["num_hidden_layers"])
        ],
        "linear_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "linear_key_head_dim": config["linear_key_head_dim"],
        "linear_value_head_dim": config["linear_value_head_dim"],
        "linear_num_key_heads": config["linear_num_key_heads"],
        "linear_num_value_heads": config["linear_num_value_heads"],
    }
    out_bias = bool(config["attention_bias"])
    return Fields(config=values, rope_width=base.rope_width, out_bias=out_bias)


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
    "deepseek_v3": deepseek,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "llama": dense,
    "mistral": dense,
    "mixtral": mixtral,
    "qwen2": dense,
    "qwen2_moe": qwen_moe,
    "qwen3": dense,
    "qwen3_moe": qwen_moe,
    "qwen3_next": qwen3_next,
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
