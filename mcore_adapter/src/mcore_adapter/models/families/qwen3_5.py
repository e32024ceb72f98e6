"""qwen3_5_text, qwen3_5_moe_text: qwen3_next with four projections of a delta net instead of two.

These are the language models of qwen3_5 and qwen3_5_moe under the names that they have without a
tower.
"""

from __future__ import annotations

from functools import partial

from mcore_adapter.convert.ops import JoinRows, Shape
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    gated_mlp,
    model_table,
    norms,
    shape_of,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.families.qwen2_moe import experts
from mcore_adapter.models.families.qwen3_next import (
    attention_of,
    delta_net,
    linear_heads,
    linear_layers,
    next_token_layer,
    rows_of_projection,
    with_delta_nets,
)
from mcore_adapter.models.fields import Fields, with_experts


def has_experts(config: Config) -> bool:
    """Return whether all layers have experts, instead of one MLP."""
    return bool(config["model_type"] == "qwen3_5_moe_text")


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights, with the layers' two kinds of attention."""
    shape = shape_of(config, num_experts=config.count("num_experts") if has_experts(config) else 0)
    linear = linear_layers(config)
    full = tuple(layer for layer in range(shape.num_layers) if layer not in set(linear))
    if has_experts(config):
        mlp = partial(experts, config, shape)
    else:
        mlp = partial(gated_mlp, shape, config.count("intermediate_size"))
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, attention_of(config), layers=full),
        projection(config, shape, linear),
        *delta_net(config, shape, linear),
        *mlp(MCORE + "mlp.", HF + "mlp."),
        *next_token_layer(config, shape, mlp),
        # Where ranks share a key head, Megatron-Core divides queries, but not their gates.
        divisible={**linear_heads(config), "num_key_value_heads": shape.num_kv_heads},
    )


def projection(config: Config, shape: Shape, layers: tuple[int, ...]) -> Param:
    """Return the row of a delta net's projection, whose rows both formats group by kind."""
    names = tuple(f"{HF}linear_attn.in_proj_{kinds}.weight" for kinds in ("qkv", "z", "b", "a"))
    blocks = rows_of_projection(config)
    keys, _, values, _, heads, _ = blocks
    lengths = (2 * keys + values, values, heads, heads)
    return Param(
        op=JoinRows(MCORE + "self_attention.in_proj.weight", names, lengths),
        shapes=tuple((length, shape.hidden) for length in lengths),
        shard=Sharded(blocks=blocks),
        layers=layers,
    )


def fields(config: Config) -> Fields:
    """Return fields with gated delta nets, and gated attention in some layers.

    A part of each head is rotated. Norms are centred on zero. Text has one position for all
    sections of the rotary frequencies, so that these need no sections.
    """
    kinds = attention_of(config)
    if not has_experts(config):
        return with_delta_nets(llama.dense_fields(config, kinds), config)
    width = config["moe_intermediate_size"]
    base = with_experts(
        llama.dense_fields(config, kinds, width=width),
        experts=config["num_experts"],
        width=width,
        topk=config["num_experts_per_tok"],
        moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )
    return with_delta_nets(base, config)
