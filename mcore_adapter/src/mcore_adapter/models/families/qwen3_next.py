"""qwen3_next: gated delta nets, gated attention in every fourth layer, routed and shared experts.

Norms are centred on zero in both formats, so their weights are not changed.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_adapter.convert.ops import RegroupByKind, Shape
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    ends,
    mtp_layer,
    mtp_prefix,
    norms,
    same,
    shape_of,
    tied_output,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.families.qwen2_moe import experts, mlps, with_sparse_layers
from mcore_adapter.models.fields import Attention, Fields


def attention_of(config: Config) -> Attention:
    """Return the variant of attention in the layers that have attention."""
    biased = config.flag("attention_bias")
    return Attention(qkv_bias=biased, out_bias=biased, qk_norm=True, gated=True)


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights, with the layers' two kinds of attention."""
    shape = shape_of(config, num_experts=config.count("num_experts"))
    linear = linear_layers(config)
    full = tuple(layer for layer in range(shape.num_layers) if layer not in set(linear))
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(shape),
            *attention(shape, attention_of(config), layers=full),
            *delta_net(config, shape, linear),
            *mlps(config, shape),
            *next_token_layer(config, shape),
        ),
        repeats=tied_output(shape),
        divisible={
            name: config.count(name) for name in ("linear_num_key_heads", "linear_num_value_heads")
        },
        config=config,
    )


def fields(config: Config) -> Fields:
    """Return fields with gated delta nets, and gated attention in every fourth layer.

    A quarter of each head is rotated. Experts are routed and shared. Norms are centred on zero.
    """
    linear, attention = set(linear_layers(config)), attention_of(config)
    base = with_sparse_layers(llama.dense_fields(config, attention), config)
    values = {
        **base.config,
        "attention_output_gate": attention.gated,
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
    return replace(base, config=values)


def next_token_layer(config: Config, shape: Shape) -> tuple[Param, ...]:
    """Return the rows of the MTP layer, which has gated attention and experts.

    Published checkpoints have one such layer.
    """
    ours, theirs = mtp_prefix(0), "mtp.layers.0."
    names = (
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    )
    within = (
        *norms(shape, ours, theirs),
        *attention(shape, attention_of(config), ours, theirs),
        *experts(config, shape, ours + "mlp.", theirs + "mlp."),
    )
    return mtp_layer(shape, 0, names, within)


def linear_layers(config: Config) -> tuple[int, ...]:
    """Return the layers with a gated delta net.

    They are those that `layer_types` names; if that key is missing, all layers but every
    `full_attention_interval`-th.

    Raises:
        ConfigError: a layer is of another kind than linear or full attention.
    """
    layers, kinds = range(config["num_hidden_layers"]), config["layer_types"]
    if kinds is None:
        every = config["full_attention_interval"]
        return tuple(layer for layer in layers if (layer + 1) % every)
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if unknown:
        raise ConfigError(
            f"config.json: layer_types {unknown} are not supported, only linear_attention and "
            "full_attention"
        )
    return tuple(layer for layer in layers if kinds[layer] == "linear_attention")


def delta_net(config: Config, shape: Shape, layers: tuple[int, ...]) -> tuple[Param, ...]:
    """Return the rows of a gated delta net.

    Hugging Face groups the rows of the projections by key head; Megatron groups them by kind, in
    the order q, k, v, z, b, a. Every tensor parallel rank holds its heads of each kind.

    Raises:
        ConfigError: the number of value heads is not a multiple of the number of key heads.
    """
    ours, theirs, hidden = MCORE + "self_attention.", HF + "linear_attn.", shape.hidden
    groups, heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    if heads % groups:
        raise ConfigError(
            f"config.json: linear_num_value_heads {heads} is no multiple of linear_num_key_heads "
            f"{groups}"
        )
    width = config.count("linear_value_head_dim")
    keys, values = groups * config.count("linear_key_head_dim"), heads * width
    of_all = keys, keys, values, values, heads, heads
    each = tuple(rows // groups for rows in of_all)
    projection = RegroupByKind(
        ours + "in_proj.weight",
        (theirs + "in_proj_qkvz.weight", theirs + "in_proj_ba.weight"),
        groups,
        (each[:4], each[4:]),
    )
    shapes = ((2 * keys + 2 * values, hidden), (2 * heads, hidden))
    conv = (2 * keys + values, 1, config.count("linear_conv_kernel_dim"))

    def row(mine: str, name: str, shape: tuple[int, ...], shard: ShardRule) -> Param:
        return same(ours + mine, theirs + name, shape, shard, layers=layers)

    return (
        Param(op=projection, shapes=shapes, shard=Sharded(blocks=of_all), layers=layers),
        row("conv1d.weight", "conv1d.weight", conv, Sharded(blocks=of_all[:3])),
        row("A_log", "A_log", (heads,), Sharded()),
        row("dt_bias", "dt_bias", (heads,), Sharded()),
        row("out_norm.weight", "norm.weight", (width,), Replicated()),
        row("out_proj.weight", "out_proj.weight", (hidden, values), Sharded(dim=1)),
    )
