"""qwen3_next: gated delta nets, gated attention in every fourth layer, routed and shared experts.

Norms are centred on zero in both formats, so their weights are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mcore_adapter.convert.ops import RegroupByKind, Shape
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    model_table,
    mtp_layer,
    mtp_prefix,
    norms,
    same,
    shape_of,
)
from mcore_adapter.models.config import Config, Size
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
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, attention_of(config), layers=full),
        projection(config, shape, linear),
        *delta_net(config, shape, linear),
        *mlps(config, shape),
        *next_token_layer(config, shape, partial(experts, config, shape)),
        # Where ranks share a key head, Megatron-Core divides queries, but not their gates.
        divisible={**linear_heads(config), "num_key_value_heads": shape.num_kv_heads},
    )


def fields(config: Config) -> Fields:
    """Return fields with gated delta nets, and gated attention in every fourth layer.

    A quarter of each head is rotated. Experts are routed and shared. Norms are centred on zero.
    """
    return with_delta_nets(
        with_sparse_layers(llama.dense_fields(config, attention_of(config)), config), config
    )


def with_delta_nets(base: Fields, config: Config) -> Fields:
    """Add gated delta nets, gates of attention, and norms that are centred on zero."""
    linear = set(linear_layers(config))
    values = {
        **base.config,
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
    return replace(base, config=values)


def next_token_layer(
    config: Config, shape: Shape, mlp: Callable[[str, str], tuple[Param, ...]]
) -> tuple[Param, ...]:
    """Return the rows of the MTP layer, which has gated attention.

    Published checkpoints have one such layer.

    Args:
        mlp: function that returns the rows of the layer's MLP, given the prefixes of its names in
            Megatron and in Hugging Face.
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
        *mlp(ours + "mlp.", theirs + "mlp."),
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


def linear_heads(config: Config) -> dict[str, Size]:
    """Return the numbers of key and of value heads of a delta net, by key of `config.json`."""
    return {name: config.count(name) for name in ("linear_num_key_heads", "linear_num_value_heads")}


def rows_of_projection(config: Config) -> tuple[int, ...]:
    """Return the number of rows of each kind in a delta net's projection: q, k, v, z, b and a.

    Raises:
        ConfigError: the number of value heads is not a multiple of the number of key heads.
    """
    groups, heads = linear_heads(config).values()
    if heads % groups:
        raise ConfigError(
            f"config.json: linear_num_value_heads {heads} is no multiple of linear_num_key_heads "
            f"{groups}"
        )
    keys = groups * config.count("linear_key_head_dim")
    values = heads * config.count("linear_value_head_dim")
    return keys, keys, values, values, heads, heads


def projection(config: Config, shape: Shape, layers: tuple[int, ...]) -> Param:
    """Return the row of a delta net's projection.

    Hugging Face groups its rows by key head; Megatron groups them by kind, in the order q, k, v, z,
    b, a. Every tensor parallel rank holds its heads of each kind.
    """
    theirs, groups = HF + "linear_attn.", config.count("linear_num_key_heads")
    of_all = rows_of_projection(config)
    keys, _, values, _, heads, _ = of_all
    each = tuple(rows // groups for rows in of_all)
    op = RegroupByKind(
        MCORE + "self_attention.in_proj.weight",
        (theirs + "in_proj_qkvz.weight", theirs + "in_proj_ba.weight"),
        groups,
        (each[:4], each[4:]),
    )
    shapes = ((2 * keys + 2 * values, shape.hidden), (2 * heads, shape.hidden))
    return Param(op=op, shapes=shapes, shard=Sharded(blocks=of_all), layers=layers)


def delta_net(config: Config, shape: Shape, layers: tuple[int, ...]) -> tuple[Param, ...]:
    """Return the rows of a gated delta net, but for its projection."""
    ours, theirs = MCORE + "self_attention.", HF + "linear_attn."
    keys, _, values, _, heads, _ = blocks = rows_of_projection(config)
    conv = (2 * keys + values, 1, config.count("linear_conv_kernel_dim"))
    width = config.count("linear_value_head_dim")

    def row(mine: str, name: str, shape: tuple[int, ...], shard: ShardRule) -> Param:
        return same(ours + mine, theirs + name, shape, shard, layers=layers)

    return (
        row("conv1d.weight", "conv1d.weight", conv, Sharded(blocks=blocks[:3])),
        row("A_log", "A_log", (heads,), Sharded()),
        row("dt_bias", "dt_bias", (heads,), Sharded()),
        row("out_norm.weight", "norm.weight", (width,), Replicated()),
        row("out_proj.weight", "out_proj.weight", (shape.hidden, values), Sharded(dim=1)),
    )
