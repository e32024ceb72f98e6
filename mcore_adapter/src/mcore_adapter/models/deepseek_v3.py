"""deepseek_v3: latent attention, dense first layers, then shared and routed experts; MTP layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
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


def table(config: Mapping[str, Any]) -> ModelTable:
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


def latent_attention(
    config: Mapping[str, Any], ours: str = MCORE, theirs: str = HF
) -> tuple[Param, ...]:
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
