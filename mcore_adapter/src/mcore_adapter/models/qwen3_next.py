"""qwen3_next: gated delta nets, every fourth layer gated attention; routed and shared experts.

Norms are centred on zero in both formats, so their weights pass as they are.
"""

from __future__ import annotations

from mcore_adapter.convert.ops import Rename, Ungroup
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models import qwen2_moe
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    ends,
    gated_mlp,
    mtp_layer,
    mtp_prefix,
    norms,
    num_experts_of,
    same,
    shape_of,
    tied_output,
)
from mcore_adapter.models.fields import Config, Fields
from mcore_adapter.models.qwen2_moe import shared_expert, sparse_layers


def table(config: Config) -> ModelTable:
    shape = shape_of(config, num_experts=num_experts_of(config))
    linear = linear_layers(config)
    full = tuple(layer for layer in range(shape.num_layers) if layer not in linear)
    sparse = sparse_layers(config)
    dense = tuple(layer for layer in range(shape.num_layers) if layer not in sparse)
    biased = bool(config.get("attention_bias", False))
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(),
            *attention(qkv_bias=biased, out_bias=biased, qk_norm=True, gated=True, layers=full),
            *delta_net(config, linear),
            *gated_mlp(layers=dense),
            same(MCORE + "mlp.router.weight", HF + "mlp.gate.weight", layers=sparse),
            *gated_mlp(
                MCORE + "mlp.experts.local_experts.@.", HF + "mlp.experts.@.", layers=sparse
            ),
            *shared_expert(sparse),
            *next_token_layer(biased),
        ),
        repeats=tied_output(shape),
        divisible={
            name: config[name] for name in ("linear_num_key_heads", "linear_num_value_heads")
        },
        config=config,
    )


def fields(config: Config) -> Fields:
    """qwen3_next: gated delta nets, every fourth layer gated attention, a quarter of heads rotated;
    routed and shared experts; norms centred on zero."""
    linear = linear_layers(config)
    biased = bool(config["attention_bias"])
    base = qwen2_moe.fields({**config, "model_type": "qwen2_moe", "qkv_bias": biased})
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
    return Fields(config=values, rope_width=base.rope_width, out_bias=biased)


def next_token_layer(biased: bool) -> tuple[Param, ...]:
    """Published checkpoints have one MTP layer, with gated attention and experts."""
    ours, theirs = mtp_prefix(0), "mtp.layers.0."
    names = (
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    )
    mlp, mlp_hf = ours + "mlp.", theirs + "mlp."
    within = (
        *norms(ours, theirs),
        *attention(ours, theirs, qkv_bias=biased, out_bias=biased, qk_norm=True, gated=True),
        same(mlp + "router.weight", mlp_hf + "gate.weight"),
        *gated_mlp(mlp + "experts.local_experts.@.", mlp_hf + "experts.@."),
        *shared_expert(None, ours, theirs),
    )
    return mtp_layer(0, names, within)


def linear_layers(config: Config) -> tuple[int, ...]:
    """Layers with a gated delta net: all but every `full_attention_interval`-th, or as listed."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("full_attention_interval", 4)
        return tuple(layer for layer in range(count) if (layer + 1) % every)
    return tuple(layer for layer in range(count) if kinds[layer] == "linear_attention")


def delta_net(config: Config, layers: tuple[int, ...]) -> tuple[Param, ...]:
    """Hugging Face groups rows of the projections by key head, Megatron by what they are.

    Every rank has its heads of each of q, k, v, z, b, a.
    """
    ours, theirs = MCORE + "self_attention.", HF + "linear_attn."
    groups, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, heads = config["linear_key_head_dim"], values // groups
    value = heads * config["linear_value_head_dim"]
    of_group = (key, key, value, value), (heads, heads)
    of_all = tuple(rows * groups for kinds in of_group for rows in kinds)
    projection = Ungroup(
        ours + "in_proj.weight",
        (theirs + "in_proj_qkvz.weight", theirs + "in_proj_ba.weight"),
        groups,
        of_group,
    )
    whole = Sharded(blocks=of_all)
    conv = Sharded(blocks=of_all[:3])
    return (
        Param(op=projection, shard=whole, layers=layers),
        Param(
            op=Rename(ours + "conv1d.weight", theirs + "conv1d.weight"), shard=conv, layers=layers
        ),
        same(ours + "A_log", theirs + "A_log", Sharded(), layers=layers),
        same(ours + "dt_bias", theirs + "dt_bias", Sharded(), layers=layers),
        same(ours + "out_norm.weight", theirs + "norm.weight", layers=layers),
        same(ours + "out_proj.weight", theirs + "out_proj.weight", Sharded(dim=1), layers=layers),
    )
