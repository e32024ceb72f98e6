"""phi3: a llama with two fused weights, one of queries, keys and values, one of gate and up."""

from __future__ import annotations

from mcore_adapter.convert.ops import RegroupQKV, Rename, Shape
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import HF, MCORE, model_table, norms, same, shape_of
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, rope_parameters


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights."""
    shape = shape_of(config)
    ours, theirs, hidden = MCORE + "self_attention.", HF + "self_attn.", shape.hidden
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = RegroupQKV(ours + "linear_qkv.weight", theirs + "qkv_proj.weight")
    out = ours + "linear_proj.weight", theirs + "o_proj.weight"
    return model_table(
        config,
        shape,
        *norms(shape),
        Param(op=qkv, shapes=((queries + 2 * keys, hidden),), shard=Sharded()),
        same(*out, (hidden, queries), Sharded(dim=1)),
        *fused_mlp(shape, config.count("intermediate_size")),
    )


def fused_mlp(shape: Shape, width: int) -> tuple[Param, ...]:
    """Return the rows of an MLP whose gate and up are one weight, gate above up."""
    ours, theirs, hidden = MCORE + "mlp.", HF + "mlp.", shape.hidden
    fc1 = Rename(ours + "linear_fc1.weight", theirs + "gate_up_proj.weight")
    fc2 = ours + "linear_fc2.weight", theirs + "down_proj.weight"
    return (
        Param(op=fc1, shapes=((2 * width, hidden),), shard=Sharded(blocks=2)),
        same(*fc2, (hidden, width), Sharded(dim=1)),
    )


def fields(config: Config) -> Fields:
    """Return the fields of a llama.

    Raises:
        ConfigError: the frequencies are those of longrope, whose old names are su and yarn.
    """
    kind = rope_parameters(config)["rope_type"]
    if kind != "default":
        raise ConfigError(
            f"config.json: rope_type {kind!r} of a phi3 cannot be built, only 'default'; longrope "
            "changes with the length of a sequence"
        )
    return llama.dense_fields(config, Attention())
