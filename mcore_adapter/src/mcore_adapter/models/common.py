"""Rows that llama-like models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.convert.ops import FuseGateUp, FuseQKV, Rename, Shape
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import Param, Place
from mcore_adapter.errors import ConversionError

MCORE, HF = "decoder.layers.*.", "model.layers.*."
EMBEDDING = "embedding.word_embeddings.weight"


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


def norms() -> tuple[Param, ...]:
    """The two norms of a layer."""
    return (
        Param(op=Rename(MCORE + "input_layernorm.weight", HF + "input_layernorm.weight")),
        Param(
            op=Rename(MCORE + "pre_mlp_layernorm.weight", HF + "post_attention_layernorm.weight")
        ),
    )


def attention(
    *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False
) -> tuple[Param, ...]:
    """Grouped-query attention."""
    ours, theirs = MCORE + "self_attention.", HF + "self_attn."
    rows = [
        Param(op=FuseQKV(ours + "linear_qkv.weight", qkv(theirs, "weight")), shard=Sharded()),
        Param(
            op=Rename(ours + "linear_proj.weight", theirs + "o_proj.weight"), shard=Sharded(dim=1)
        ),
    ]
    if qkv_bias:
        rows.append(
            Param(op=FuseQKV(ours + "linear_qkv.bias", qkv(theirs, "bias")), shard=Sharded())
        )
    if out_bias:
        rows.append(Param(op=Rename(ours + "linear_proj.bias", theirs + "o_proj.bias")))
    if qk_norm:
        rows += [
            Param(op=Rename(f"{ours}{x}_layernorm.weight", f"{theirs}{x}_norm.weight"))
            for x in "qk"
        ]
    return tuple(rows)


def gated_mlp(
    ours: str = MCORE + "mlp.",
    theirs: str = HF + "mlp.",
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    layers: range | tuple[int, ...] | None = None,
) -> tuple[Param, ...]:
    """down(act(gate(x)) * up(x)), of a layer or, with `@` in the prefixes, of its experts."""
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    return (
        Param(
            op=FuseGateUp(ours + "linear_fc1.weight", (gate, up)),
            shard=Sharded(blocks=2),
            layers=layers,
        ),
        Param(op=Rename(ours + "linear_fc2.weight", down), shard=Sharded(dim=1), layers=layers),
    )


def qkv(prefix: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv")
