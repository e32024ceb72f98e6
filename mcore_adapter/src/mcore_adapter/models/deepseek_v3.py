"""deepseek_v3: latent attention, dense first layers, then shared and routed experts; MTP layers."""

from __future__ import annotations

from typing import Any

from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models import llama
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
    num_experts_of,
    same,
    shape_of,
    tied_output,
)
from mcore_adapter.models.fields import Config, Fields, expect, rope_parameters, with_experts


def table(config: Config) -> ModelTable:
    shape = shape_of(config, num_experts=num_experts_of(config))
    dense = range(config["first_k_dense_replace"])
    sparse = range(len(dense), shape.num_layers)
    params = [
        *ends(shape),
        *norms(),
        *latent_attention(config),
        *gated_mlp(layers=dense),
        *experts(MCORE, HF, layers=sparse),
    ]
    repeats = tied_output(shape)
    for number in range(config.get("num_nextn_predict_layers") or 0):
        ours, theirs = mtp_prefix(number), f"model.layers.{shape.num_layers + number}."
        within = (
            *norms(ours, theirs),
            *latent_attention(config, ours, theirs),
            *experts(ours, theirs),
        )
        params += mtp_layer(number, deepseek_mtp(theirs), within)
        repeats |= mtp_repeats(theirs, shape)
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=tuple(params),
        dropped=("model.layers.*.self_attn.rotary_emb.inv_freq",),
        repeats=repeats,
        config=config,
    )


def fields(config: Config) -> Fields:
    """Latent attention, groups of experts, a correction of the router's scores."""
    # Megatron-Core rotates neighbouring pairs, and has one epsilon for all norms.
    expect(config, "rope_interleave", True)
    expect(config, "attention_bias", False)
    if config["rms_norm_eps"] != 1e-6:
        raise ConfigError(
            f"config.json: rms_norm_eps is {config['rms_norm_eps']}, expected 1e-6, which the "
            "norms of latent attention have whatever it is"
        )
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    base = llama.fields({**config, "head_dim": head_dim})
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


def latent_attention(config: Config, ours: str = MCORE, theirs: str = HF) -> tuple[Param, ...]:
    """Multi-head latent attention: queries, keys and values pass through narrow projections.

    The narrow ones are cut, too: in Megatron's local layers they are column parallel.
    """
    ours, theirs = ours + "self_attention.", theirs + "self_attn."

    def wide(mine: str, name: str) -> Param:
        return same(f"{ours}{mine}.weight", f"{theirs}{name}.weight", Sharded())

    if config.get("q_lora_rank") is None:
        queries = [wide("linear_q_proj", "q_proj")]
    else:
        queries = [
            wide("linear_q_down_proj", "q_a_proj"),
            same(ours + "q_layernorm.weight", theirs + "q_a_layernorm.weight"),
            wide("linear_q_up_proj", "q_b_proj"),
        ]
    rows = [
        *queries,
        wide("linear_kv_down_proj", "kv_a_proj_with_mqa"),
        same(ours + "kv_layernorm.weight", theirs + "kv_a_layernorm.weight"),
        wide("linear_kv_up_proj", "kv_b_proj"),
        same(ours + "linear_proj.weight", theirs + "o_proj.weight", Sharded(dim=1)),
    ]
    return tuple(rows)


def experts(ours: str, theirs: str, *, layers: Layers = None) -> tuple[Param, ...]:
    """A router with a correction of its scores, routed experts, and shared ones as one."""
    ours, theirs = ours + "mlp.", theirs + "mlp."
    return (
        *corrected_router(ours, theirs, layers=layers),
        *gated_mlp(ours + "experts.local_experts.@.", theirs + "experts.@.", layers=layers),
        *gated_mlp(ours + "shared_experts.", theirs + "shared_experts.", layers=layers),
    )
