"""deepseek_v3, kimi_k2, glm4_moe_lite: latent attention, dense first layers, then shared and routed
experts; MTP layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mcore_adapter.convert.ops import Shape
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import (
    HF,
    MCORE,
    Layers,
    corrected_router,
    deepseek_mtp,
    ends,
    gated_mlp,
    mtp_layer,
    mtp_prefix,
    mtp_repeats,
    norms,
    same,
    shape_of,
    tied_output,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import (
    Attention,
    Fields,
    RopeParameters,
    expect,
    rope_parameters,
    with_experts,
    yarn_mscale,
)


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; with MTP layers, one set of rows for each."""
    return latent_table(config, latent_attention)


def latent_table(config: Config, attention: Callable[..., tuple[Param, ...]]) -> ModelTable:
    """Return the table of a model with latent attention; `attention` has the signature of
    `latent_attention`."""
    # Every head has its own keys and values, whatever `num_key_value_heads` says.
    alone = config.but(num_key_value_heads=None)
    shape = shape_of(alone, num_experts=config.count("n_routed_experts"))
    dense, sparse = dense_layers(config)
    params = [
        *ends(shape),
        *norms(shape),
        *attention(config, shape),
        *gated_mlp(shape, config.count("intermediate_size"), layers=dense),
        *experts(config, shape, MCORE, HF, layers=sparse),
    ]
    repeats = tied_output(shape)
    for number in range(config["num_nextn_predict_layers"] or 0):
        ours, theirs = mtp_prefix(number), f"model.layers.{shape.num_layers + number:d}."
        within = (
            *norms(shape, ours, theirs),
            *attention(config, shape, ours, theirs),
            *experts(config, shape, ours, theirs),
        )
        params += mtp_layer(shape, number, deepseek_mtp(theirs), within)
        repeats |= mtp_repeats(theirs, shape)
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=tuple(params),
        repeats=repeats,
        config=config,
    )


def dense_layers(config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers without experts, and the layers with experts.

    They are those that `mlp_layer_types` names, in model types with that key. If it is missing, and
    in other types, the first layers have no experts.

    Raises:
        ConfigError: a layer is of another kind than dense or sparse.
    """
    layers, kind = range(config.count("num_hidden_layers")), config["model_type"]
    kinds = config["mlp_layer_types"] if kind in ("glm4_moe_lite", "glm_moe_dsa") else None
    if kinds is None:
        first = 1 if kind == "glm4_moe_lite" else config.count("first_k_dense_replace")
        return tuple(layers[:first]), tuple(layers[first:])
    unknown = sorted(set(kinds) - {"dense", "sparse"})
    if unknown:
        raise ConfigError(
            f"config.json: mlp_layer_types {unknown} are not supported, only dense and sparse"
        )
    dense, sparse = (tuple(i for i in layers if kinds[i] == kind) for kind in ("dense", "sparse"))
    return dense, sparse


def fields(config: Config) -> Fields:
    """Return fields with latent attention, groups of experts, and a correction of router scores.

    Raises:
        ConfigError: a key has a value that cannot be built.
    """
    # Megatron-Core rotates neighbouring dimensions in pairs.
    expect(config, "rope_interleave", True)
    return with_corrected_experts(latent_fields(config), config)


def latent_fields(config: Config) -> Fields:
    """Return fields with latent attention and without experts.

    Raises:
        ConfigError: a key has a value that cannot be built.
    """
    expect(config, "attention_bias", False)
    base = llama.dense_fields(config.but(num_key_value_heads=None), Attention())
    values = {
        **base.config,
        "kv_channels": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "qk_layernorm": True,
        **latent_rope(config),
    }
    return Fields(config=values, latent=True, rope_width=config["qk_rope_head_dim"])


def with_corrected_experts(base: Fields, config: Config) -> Fields:
    """Add experts as in deepseek_v3, if any layer has experts.

    The router's scores are sigmoids. Experts are chosen in groups, by scores to which a correction
    is added.

    Raises:
        ConfigError: a key has a value that cannot be built.
    """
    expect(config, "norm_topk_prob", True)
    groups, chosen = config["n_group"] or 1, config["topk_group"] or 1
    topk = config["num_experts_per_tok"]
    grouped: dict[str, Any] = {}
    if groups > 1:
        if topk // chosen != 2:
            raise ConfigError(
                f"config.json: groups of experts are rated by their best {topk // chosen} (of "
                f"num_experts_per_tok {topk}, topk_group {chosen}), expected 2"
            )
        grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    _, sparse = dense_layers(config)
    if not sparse:
        return base
    return with_experts(
        base,
        experts=config["n_routed_experts"],
        width=config["moe_intermediate_size"],
        topk=topk,
        sparse=[layer in set(sparse) for layer in range(config["num_hidden_layers"])],
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"]
        * config["n_shared_experts"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # The correction is a part of the checkpoint; post-training does not change it.
        moe_router_bias_update_rate=0.0,
        moe_router_topk_scaling_factor=config["routed_scaling_factor"],
        **grouped,
    )


def latent_rope(config: Config) -> dict[str, Any]:
    """Return the fields from which latent attention computes its rotary frequencies.

    Raises:
        ConfigError: the rope type is neither default nor yarn, or yarn has a value that cannot be
            built.
    """
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise ConfigError(
            f"config.json: latent attention with rope_type {kind!r} cannot be built, only with "
            "default and yarn"
        )
    found: dict[str, Any] = {"rope_type": "rope", "rotary_base": rope["rope_theta"]}
    if kind == "yarn":
        if not rope.get("truncate", True):
            raise ConfigError(
                "config.json: latent attention with truncate false in its rope parameters cannot "
                "be built, expected true or no such key"
            )
        found |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            "mscale": _mscale(rope),
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return found


def _mscale(rope: RopeParameters) -> float:
    """Return the `mscale` with which Megatron-Core scales cosines and sines as transformers does.

    Megatron-Core always takes the quotient of the scales for `mscale` and `mscale_all_dim`.
    transformers takes it if both are given, else the scale for 1, and `attention_factor` before
    either.

    Raises:
        ConfigError: `attention_factor` is given for a factor up to 1, at which Megatron-Core
            scales nothing.
    """
    one, all_dims, factor = rope.get("mscale"), rope.get("mscale_all_dim"), rope["factor"]
    scale = rope.get("attention_factor")
    if scale is None and (one or not all_dims):
        return float(one) if one and all_dims else 1.0
    if factor <= 1:
        if scale in (None, 1):
            return 1.0
        raise ConfigError(
            f"config.json: latent attention with attention_factor {scale} and factor {factor} in "
            "its rope parameters cannot be built, expected a factor above 1, or no attention_factor"
        )
    wanted = yarn_mscale(factor) if scale is None else scale
    return float((wanted * yarn_mscale(factor, all_dims or 0.0) - 1.0) / (0.1 * math.log(factor)))


def latent_attention(
    config: Config, shape: Shape, ours: str = MCORE, theirs: str = HF
) -> tuple[Param, ...]:
    """Return the rows of multi-head latent attention.

    The narrow projections are sharded, too: in Megatron's local layers they are column parallel.
    `ours` and `theirs` are the prefixes of the layer.
    """
    ours, theirs = ours + "self_attention.", theirs + "self_attn."
    hidden, heads, narrow = shape.hidden, shape.num_heads, config.count("kv_lora_rank")
    plain, turned = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    queries, values = heads * (plain + turned), config.count("v_head_dim")

    def wide(mine: str, name: str, out: int, inner: int, dim: int = 0) -> Param:
        return same(f"{ours}{mine}.weight", f"{theirs}{name}.weight", (out, inner), Sharded(dim))

    def norm(mine: str, name: str, width: int) -> Param:
        return same(f"{ours}{mine}.weight", f"{theirs}{name}.weight", (width,))

    def bias(mine: str, name: str, width: int, shard: ShardRule) -> list[Param]:
        row = same(f"{ours}{mine}.bias", f"{theirs}{name}.bias", (width,), shard)
        return [row] if config.flag("attention_bias") else []

    of_queries = [wide("linear_q_proj", "q_proj", queries, hidden)]
    if config["q_lora_rank"] is not None:
        rank = config.count("q_lora_rank")
        of_queries = [
            wide("linear_q_down_proj", "q_a_proj", rank, hidden),
            *bias("linear_q_down_proj", "q_a_proj", rank, Sharded()),
            norm("q_layernorm", "q_a_layernorm", rank),
            wide("linear_q_up_proj", "q_b_proj", queries, rank),
        ]
    return (
        *of_queries,
        wide("linear_kv_down_proj", "kv_a_proj_with_mqa", narrow + turned, hidden),
        *bias("linear_kv_down_proj", "kv_a_proj_with_mqa", narrow + turned, Sharded()),
        norm("kv_layernorm", "kv_a_layernorm", narrow),
        wide("linear_kv_up_proj", "kv_b_proj", heads * (plain + values), narrow),
        wide("linear_proj", "o_proj", hidden, heads * values, dim=1),
        *bias("linear_proj", "o_proj", hidden, Replicated()),
    )


def experts(
    config: Config, shape: Shape, ours: str, theirs: str, *, layers: Layers = None
) -> tuple[Param, ...]:
    """Return the rows of a router, its routed experts, and its shared experts.

    The router has a correction of its scores. All shared experts are one MLP. `ours` and `theirs`
    are the prefixes of the layer, such as `decoder.layers.*.`.
    """
    ours, theirs = ours + "mlp.", theirs + "mlp."
    routed, width = ours + "experts.local_experts.@.", config.count("moe_intermediate_size")
    shared = width * config.count("n_shared_experts")
    return (
        *corrected_router(shape, ours, theirs, layers=layers),
        *gated_mlp(shape, width, routed, theirs + "experts.@.", layers=layers),
        *gated_mlp(
            shape, shared, ours + "shared_experts.", theirs + "shared_experts.", layers=layers
        ),
    )
