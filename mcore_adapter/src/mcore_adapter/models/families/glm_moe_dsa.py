"""glm_moe_dsa (GLM-5): deepseek_v3 with sparse attention, whose tokens an indexer chooses.

The indexer is not trained: transformers computes it without gradients.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_adapter.convert.ops import Shape
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import HF, MCORE, Layers, same
from mcore_adapter.models.config import Config
from mcore_adapter.models.families.deepseek_v3 import (
    latent_attention,
    latent_fields,
    latent_table,
    with_corrected_experts,
)
from mcore_adapter.models.fields import Fields


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; with MTP layers, one set of rows for each."""
    return latent_table(config, sparse_attention)


def sparse_attention(
    config: Config, shape: Shape, ours: str = MCORE, theirs: str = HF
) -> tuple[Param, ...]:
    """Return the rows of latent attention and of its indexer. `ours` and `theirs` are the prefixes
    of the layer."""
    layers = indexed_layers(config) if ours == MCORE else None
    rows = latent_attention(config, shape, ours, theirs)
    return (*rows, *indexer(config, shape, ours, theirs, layers=layers))


def indexer(
    config: Config, shape: Shape, ours: str, theirs: str, *, layers: Layers
) -> tuple[Param, ...]:
    """Return the rows of the indexer, which every tensor parallel rank has in full."""
    ours, theirs = ours + "self_attention.core_attention.indexer.", theirs + "self_attn.indexer."
    heads, width = config.count("index_n_heads"), config.count("index_head_dim")
    shapes = {
        "wq_b.weight": (heads * width, config.count("q_lora_rank")),
        "wk.weight": (width, shape.hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, shape.hidden),
    }
    return tuple(
        same(ours + name, theirs + name, size, layers=layers) for name, size in shapes.items()
    )


def indexed_layers(config: Config) -> tuple[int, ...]:
    """Return the layers with an indexer of their own.

    They are those that `indexer_types` names, or `index_topk_pattern`; without these keys, every
    `index_topk_freq`-th after the first `index_skip_topk_offset`, and these.

    Raises:
        ConfigError: a layer is of another kind than full or shared.
    """
    layers = range(config["num_hidden_layers"])
    kinds = config["indexer_types"] or config["index_topk_pattern"]
    if kinds is None:
        every, first = max(config["index_topk_freq"], 1), config["index_skip_topk_offset"]
        return tuple(i for i in layers if max(i - first + 1, 0) % every == 0)
    unknown = sorted(set(kinds) - {"full", "shared", "F", "S"})
    if unknown or len(kinds) != len(layers):
        raise ConfigError(
            f"config.json: indexer_types {list(kinds)} are not supported, only full and shared, "
            f"one for each of {len(layers)} layers"
        )
    return tuple(i for i in layers if kinds[i] in ("full", "F"))


def fields(config: Config) -> Fields:
    """Return the fields of deepseek_v3, and those of the indexer.

    Raises:
        ConfigError: a key has a value that cannot be built.
    """
    count = config["num_hidden_layers"]
    if len(indexed_layers(config)) != count:
        raise ConfigError(
            f"config.json: {count - len(indexed_layers(config))} of {count} layers use the tokens "
            "that the indexer of an earlier layer chose (indexer_types shared), which cannot be "
            "built; they can only be converted"
        )
    base = latent_fields(config)
    if base.config["rope_type"] != "rope":
        raise ConfigError("config.json: an indexer with rope_type yarn cannot be built")
    values = {
        **base.config,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": config["index_head_dim"],
        "dsa_indexer_topk": config["index_topk"],
    }
    return with_corrected_experts(replace(base, config=values), config)
