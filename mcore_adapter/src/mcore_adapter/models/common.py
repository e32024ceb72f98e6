"""Rows that llama-like models share.

All helpers take the prefix of a layer in Megatron (`ours`) and in Hugging Face (`theirs`), because
layers that predict further tokens (MTP) have the same rows elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_adapter.convert.ops import FuseGateUp, FuseQKV, Rename, Shape
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param, Place
from mcore_adapter.errors import ConversionError

MCORE, HF = "decoder.layers.*.", "model.layers.*."
EMBEDDING = "embedding.word_embeddings.weight"
MTP_EMBEDDING = "mtp." + EMBEDDING
Layers = range | tuple[int, ...] | None


def shape_of(config: Mapping[str, Any], *, num_experts: int = 0) -> Shape:
    """From the names that almost all `config.json` use."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return Shape(
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        hidden=hidden,
        vocab=config["vocab_size"],
        num_experts=num_experts,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Routed experts; families, and versions of their configs, name them differently."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config:
            return int(config[name])
    raise ConversionError("config.json names no num_experts, num_local_experts, n_routed_experts")


def ends(shape: Shape) -> tuple[Param, ...]:
    """Embedding, last norm and output layer."""
    embedding = Param(
        op=Rename(EMBEDDING, "model.embed_tokens.weight"), shard=Sharded(), pads_vocab=True
    )
    output = Param(
        op=Rename(
            "output_layer.weight", "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
        ),
        shard=Sharded(),
        pads_vocab=True,
        place=Place.LAST,
        copy_of=EMBEDDING if shape.tied else None,
    )
    norm = Param(op=Rename("decoder.final_layernorm.weight", "model.norm.weight"), place=Place.LAST)
    return embedding, norm, output


def tied_output(shape: Shape) -> dict[str, str]:
    """Some checkpoints with tied embeddings store them twice."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}


def norms(ours: str = MCORE, theirs: str = HF) -> tuple[Param, ...]:
    """The two norms of a layer."""
    return (
        same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight"),
        same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight"),
    )


def attention(
    ours: str = MCORE,
    theirs: str = HF,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
    layers: Layers = None,
) -> tuple[Param, ...]:
    """Grouped-query attention."""
    ours, theirs = ours + "self_attention.", theirs + "self_attn."

    def fused(kind: str) -> Param:
        op = FuseQKV(f"{ours}linear_qkv.{kind}", qkv(theirs, kind), gated=gated)
        return Param(op=op, shard=Sharded(), layers=layers)

    rows = [
        fused("weight"),
        same(ours + "linear_proj.weight", theirs + "o_proj.weight", Sharded(dim=1), layers=layers),
    ]
    if qkv_bias:
        rows.append(fused("bias"))
    if out_bias:
        rows.append(same(ours + "linear_proj.bias", theirs + "o_proj.bias", layers=layers))
    if qk_norm:
        rows += [
            same(f"{ours}{x}_layernorm.weight", f"{theirs}{x}_norm.weight", layers=layers)
            for x in "qk"
        ]
    return tuple(rows)


def gated_mlp(
    ours: str = MCORE + "mlp.",
    theirs: str = HF + "mlp.",
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
    layers: Layers = None,
) -> tuple[Param, ...]:
    """down(act(gate(x)) * up(x)), of a layer or, with `@` in the prefixes, of its experts."""
    gate, up, down = (theirs + name for name in names)

    def first(kind: str) -> Param:
        op = FuseGateUp(f"{ours}linear_fc1.{kind}", (f"{gate}.{kind}", f"{up}.{kind}"))
        return Param(op=op, shard=Sharded(blocks=2), layers=layers)

    weights = (
        first("weight"),
        same(ours + "linear_fc2.weight", down + ".weight", Sharded(dim=1), layers=layers),
    )
    if not bias:
        return weights
    return (*weights, first("bias"), same(ours + "linear_fc2.bias", down + ".bias", layers=layers))


def corrected_router(ours: str, theirs: str, *, layers: Layers = None) -> tuple[Param, ...]:
    """A router with a bias per expert that balances their load (DeepSeek-V3).

    The bias is updated in small steps, so it stays as precise as it is.
    """
    return (
        same(ours + "router.weight", theirs + "gate.weight", layers=layers),
        Param(
            op=Rename(ours + "router.expert_bias", theirs + "gate.e_score_correction_bias"),
            layers=layers,
            keeps_dtype=True,
        ),
    )


def mtp_layer(
    number: int, names: tuple[str, str, str, str], layer: Iterable[Param]
) -> tuple[Param, ...]:
    """The `number`-th layer that predicts a further token.

    Args:
        names: in Hugging Face, of the norms of the embedding and of the hidden states, of the
            projection that takes both, and of the last norm.
        layer: rows of the transformer layer within, see `mtp_prefix`.
    """
    ours = f"mtp.layers.{number}."
    embedding, hidden, projection, last = names
    own = (
        same(ours + "enorm.weight", embedding),
        same(ours + "hnorm.weight", hidden),
        same(ours + "eh_proj.weight", projection, Sharded()),
        same(ours + "final_layernorm.weight", last),
    )
    return tuple(replace(row, place=Place.LAST, optional=True) for row in (*own, *layer))


def deepseek_mtp(theirs: str) -> tuple[str, str, str, str]:
    """Names for `mtp_layer` where it is numbered behind the layers of the model."""
    kinds = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    enorm, hnorm, projection, last = (f"{theirs}{kind}.weight" for kind in kinds)
    return enorm, hnorm, projection, last


def mtp_prefix(number: int) -> str:
    """Prefix of the transformer layer in a Megatron MTP layer."""
    return f"mtp.layers.{number}.transformer_layer."


def num_mtp_layers(table: ModelTable) -> int:
    """Layers that predict further tokens."""
    return len({row.op.mcore.split(".")[2] for row in table.params if row.optional})


def mtp_embedding() -> Param:
    """The embedding once more: layers that predict further tokens need one where they are computed.
    A row of no table, because files do not have it."""
    return Param(
        op=Rename(MTP_EMBEDDING, "model.embed_tokens.weight"),
        shard=Sharded(),
        pads_vocab=True,
        place=Place.LAST,
        copy_of=EMBEDDING,
    )


def mtp_repeats(theirs: str, shape: Shape) -> dict[str, str]:
    """MTP layers share embedding and output layer, which checkpoints store again."""
    embedding = "model.embed_tokens.weight"
    return {
        theirs + "embed_tokens.weight": embedding,
        theirs + "shared_head.head.weight": embedding if shape.tied else "lm_head.weight",
    }


def same(ours: str, theirs: str, shard: ShardRule | None = None, *, layers: Layers = None) -> Param:
    """The same tensor under another name."""
    return Param(op=Rename(ours, theirs), shard=shard or Replicated(), layers=layers)


def qkv(prefix: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv")
