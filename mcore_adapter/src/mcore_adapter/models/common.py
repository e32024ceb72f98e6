"""Table rows that llama-like models share.

Helpers for rows of a layer take the prefix of the layer's names in Megatron (`ours`) and in Hugging
Face (`theirs`), because layers for multi-token prediction (MTP) have the same rows under other
prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mcore_adapter.convert.ops import FuseGateUp, FuseQKV, Rename, Shape
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param, PipelineEnd
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.config import Config, Size
from mcore_adapter.models.fields import Attention

MCORE, HF = "decoder.layers.*.", "model.layers.*."
"""Prefixes of a layer's names in Megatron and in Hugging Face; `*` is the number of the layer."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER, LM_HEAD = "output_layer.weight", "lm_head.weight"
"""Names of the output layer in Megatron and, if it is not tied, in Hugging Face."""
MTP_EMBEDDING = "mtp." + EMBEDDING
"""Name of the copy of the embedding for MTP layers, see `mtp_embedding`."""
Layers = range | tuple[int, ...] | None
"""Layers that have a row; None: all."""


def shape_of(config: Config, *, num_experts: int = 0) -> Shape:
    """Read the sizes of a model from keys that almost all configs use.

    Raises:
        ConfigError: a count is missing, or the number of attention heads is not a multiple of the
            number of key-value heads.
    """
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    groups = heads if config["num_key_value_heads"] is None else config.count("num_key_value_heads")
    if heads % groups:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{groups}"
        )
    if config["head_dim"] is not None:
        head_dim = config.count("head_dim")
    else:
        head_dim = Size(hidden // heads, "hidden_size // num_attention_heads")
    return Shape(
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        hidden=hidden,
        vocab=config.count("vocab_size"),
        num_experts=num_experts,
        tied=config.flag("tie_word_embeddings"),
    )


def model_table(
    config: Config, shape: Shape, *rows: Param, divisible: Mapping[str, int] | None = None
) -> ModelTable:
    """Return the table of a model: the rows of the embedding, the last norm and the output layer,
    then those of its layers.

    Args:
        divisible: see `ModelTable.divisible`.
    """
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(*ends(shape), *rows),
        repeats=tied_output(shape),
        divisible=divisible or {},
        config=config,
    )


def ends(shape: Shape) -> tuple[Param, ...]:
    """Return the rows of the embedding, the last norm and the output layer."""
    rows = ((shape.vocab, shape.hidden),)
    embedding = Param(
        op=Rename(EMBEDDING, "model.embed_tokens.weight"),
        shapes=rows,
        shard=Sharded(),
        pads_vocab=True,
    )
    output = Param(
        op=Rename(OUTPUT_LAYER, "model.embed_tokens.weight" if shape.tied else LM_HEAD),
        shapes=rows,
        shard=Sharded(),
        pads_vocab=True,
        place=PipelineEnd.LAST,
        copy_of=EMBEDDING if shape.tied else None,
    )
    norm = Param(
        op=Rename("decoder.final_layernorm.weight", "model.norm.weight"),
        shapes=((shape.hidden,),),
        place=PipelineEnd.LAST,
    )
    return embedding, norm, output


def tied_output(shape: Shape) -> dict[str, str]:
    """Map the second name of a tied embedding to the name that it repeats.

    Some checkpoints store a tied embedding twice. The result is empty if the embedding is not tied.
    """
    return {LM_HEAD: "model.embed_tokens.weight"} if shape.tied else {}


def norms(
    shape: Shape, ours: str = MCORE, theirs: str = HF, *, mlp: str = "post_attention_layernorm"
) -> tuple[Param, ...]:
    """Return the rows of the norms of a layer before attention and before the MLP.

    Their names begin with `ours` in Megatron and with `theirs` in Hugging Face. `mlp` is the name
    of the second one in Hugging Face.
    """
    width = (shape.hidden,)
    return (
        same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", width),
        same(ours + "pre_mlp_layernorm.weight", f"{theirs}{mlp}.weight", width),
    )


def output_norms(shape: Shape, of_attention: str, of_mlp: str) -> tuple[Param, ...]:
    """Return the rows of the norms behind attention and behind the MLP, by their names in Hugging
    Face."""
    names = (("post_attention", of_attention), ("post_mlp", of_mlp))
    width = (shape.hidden,)
    return tuple(
        same(f"{MCORE}{ours}_layernorm.weight", f"{HF}{theirs}.weight", width)
        for ours, theirs in names
    )


def attention(
    shape: Shape,
    kinds: Attention,
    ours: str = MCORE,
    theirs: str = HF,
    *,
    layers: Layers = None,
    own: bool = False,
) -> tuple[Param, ...]:
    """Return the rows of grouped-query attention of the variant `kinds`.

    Their names begin with `ours` in Megatron and with `theirs` in Hugging Face: the prefixes of a
    layer. With `own`, heads have the sizes of `shape`, and not those of the model's other layers.
    """
    ours, theirs = ours + "self_attention.", theirs + "self_attn."
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    lengths = (2 * queries if kinds.gated else queries, keys, keys)

    def fused(kind: str, *rest: int) -> Param:
        names = qkv(theirs, kind)[: 2 if kinds.keys_as_values else 3]
        name, sizes = f"{ours}linear_qkv.{kind}", shape if own else None
        op = FuseQKV(name, names, gated=kinds.gated, own=sizes)
        shapes = tuple((length, *rest) for length in lengths[: len(names)])
        return Param(op=op, shapes=shapes, shard=Sharded(), layers=layers)

    def out(kind: str, shape: tuple[int, ...], shard: ShardRule) -> Param:
        mine, name = f"{ours}linear_proj.{kind}", f"{theirs}o_proj.{kind}"
        return same(mine, name, shape, shard, layers=layers)

    rows = [fused("weight", shape.hidden), out("weight", (shape.hidden, queries), Sharded(dim=1))]
    if kinds.qkv_bias:
        rows.append(fused("bias"))
    if kinds.out_bias:
        rows.append(out("bias", (shape.hidden,), Replicated()))
    if kinds.qk_norm:
        width = (shape.head_dim,)
        rows += [
            same(f"{ours}{x}_layernorm.weight", f"{theirs}{x}_norm.weight", width, layers=layers)
            for x in "qk"
        ]
    return tuple(rows)


def gated_mlp(
    shape: Shape,
    width: int,
    ours: str = MCORE + "mlp.",
    theirs: str = HF + "mlp.",
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
    layers: Layers = None,
) -> tuple[Param, ...]:
    """Return the rows of down(act(gate(x)) * up(x)), for a layer or for its experts.

    Args:
        width: number of hidden dimensions of the MLP.
        ours: prefix of the names in Megatron; contains `@` for experts.
        theirs: prefix of the names in Hugging Face; contains `@` for experts.
        names: names of gate, up and down in Hugging Face.
    """
    gate, up, down = (theirs + name for name in names)

    def first(kind: str, *rest: int) -> Param:
        op = FuseGateUp(f"{ours}linear_fc1.{kind}", (f"{gate}.{kind}", f"{up}.{kind}"))
        shapes = ((width, *rest), (width, *rest))
        return Param(op=op, shapes=shapes, shard=Sharded(blocks=2), layers=layers)

    def second(kind: str, shape: tuple[int, ...], shard: ShardRule) -> Param:
        return same(f"{ours}linear_fc2.{kind}", f"{down}.{kind}", shape, shard, layers=layers)

    weights = (
        first("weight", shape.hidden),
        second("weight", (shape.hidden, width), Sharded(dim=1)),
    )
    if not bias:
        return weights
    return (*weights, first("bias"), second("bias", (shape.hidden,), Replicated()))


def corrected_router(
    shape: Shape, ours: str, theirs: str, *, layers: Layers = None
) -> tuple[Param, ...]:
    """Return the rows of a router with a bias per expert that balances the load (DeepSeek-V3).

    Training updates the bias in small steps, so the bias keeps its dtype when a checkpoint is
    converted to another one. `ours` and `theirs` are prefixes of the layer's MLP, such as
    `decoder.layers.*.mlp.`.
    """
    experts = shape.num_experts
    return (
        same(
            ours + "router.weight", theirs + "gate.weight", (experts, shape.hidden), layers=layers
        ),
        Param(
            op=Rename(ours + "router.expert_bias", theirs + "gate.e_score_correction_bias"),
            shapes=((experts,),),
            layers=layers,
            keeps_dtype=True,
        ),
    )


def mtp_layer(
    shape: Shape, number: int, names: tuple[str, str, str, str], layer: Iterable[Param]
) -> tuple[Param, ...]:
    """Return the rows of the `number`-th MTP layer, counted from 0.

    Args:
        names: Hugging Face names of four weights: the norm of the embedding, the norm of the hidden
            states, the projection that takes both, and the last norm.
        layer: rows of the transformer layer inside the MTP layer, see `mtp_prefix`.
    """
    ours, hidden = f"mtp.layers.{number}.", shape.hidden
    of_embedding, of_hidden, projection, last = names
    own = (
        same(ours + "enorm.weight", of_embedding, (hidden,)),
        same(ours + "hnorm.weight", of_hidden, (hidden,)),
        same(ours + "eh_proj.weight", projection, (hidden, 2 * hidden), Sharded()),
        same(ours + "final_layernorm.weight", last, (hidden,)),
    )
    return tuple(replace(row, place=PipelineEnd.LAST, optional=True) for row in (*own, *layer))


def deepseek_mtp(theirs: str) -> tuple[str, str, str, str]:
    """Return the names for `mtp_layer`, for checkpoints that count MTP layers after the others.

    `theirs` is the prefix of the MTP layer in Hugging Face, such as `model.layers.61.`.
    """
    kinds = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    enorm, hnorm, projection, last = (f"{theirs}{kind}.weight" for kind in kinds)
    return enorm, hnorm, projection, last


def mtp_prefix(number: int) -> str:
    """Return the prefix of the transformer layer inside the `number`-th Megatron MTP layer."""
    return f"mtp.layers.{number}.transformer_layer."


def num_mtp_layers(table: ModelTable) -> int:
    """Return the number of MTP layers in a table."""
    return len({row.op.mcore.split(".")[2] for row in table.params if row.optional})


def mtp_embedding(shape: Shape) -> Param:
    """Return the row of a copy of the embedding, which MTP layers need on their own stage.

    No table has this row, because files do not contain the copy.
    """
    return Param(
        op=Rename(MTP_EMBEDDING, "model.embed_tokens.weight"),
        shapes=((shape.vocab, shape.hidden),),
        shard=Sharded(),
        pads_vocab=True,
        place=PipelineEnd.LAST,
        copy_of=EMBEDDING,
    )


def mtp_repeats(theirs: str, shape: Shape) -> dict[str, str]:
    """Map the names of copies in an MTP layer to the names of the weights that they repeat.

    MTP layers share the embedding and the output layer, but checkpoints store both again. `theirs`
    is the prefix of the MTP layer in Hugging Face.
    """
    embedding = "model.embed_tokens.weight"
    return {
        theirs + "embed_tokens.weight": embedding,
        theirs + "shared_head.head.weight": embedding if shape.tied else LM_HEAD,
    }


def same(
    ours: str,
    theirs: str,
    shape: tuple[int, ...],
    shard: ShardRule | None = None,
    *,
    layers: Layers = None,
) -> Param:
    """Return the row of a tensor that is equal in both formats except for its name.

    Args:
        ours: name in Megatron.
        theirs: name in Hugging Face.
        shard: rule that cuts the tensor over ranks; None: all ranks hold all of it.
        layers: layers that have the row; None: all.
    """
    op = Rename(ours, theirs)
    return Param(op=op, shapes=(shape,), shard=shard or Replicated(), layers=layers)


def qkv(prefix: str, kind: str) -> tuple[str, ...]:
    """Return the Hugging Face names of the projections to queries, keys and values.

    `prefix` is that of attention, such as `model.layers.*.self_attn.`; `kind` is weight or bias.
    """
    return tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv")
