"""gemma3_text: windows and frequencies of their own in most layers, norms also behind attention and
MLP, scaled embeddings, capped logits.

Norms are centred on zero in both formats, so their weights are not changed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import (
    attention,
    gated_mlp,
    model_table,
    norms,
    output_norms,
    shape_of,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, expect, layer_kinds


def attention_of(config: Config) -> Attention:
    """Return the variant of attention."""
    biased = config.flag("attention_bias")
    return Attention(qkv_bias=biased, out_bias=biased, qk_norm=True)


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; a layer has four norms."""
    shape = shape_of(config)
    return model_table(
        config,
        shape,
        *norms(shape, mlp="pre_feedforward_layernorm"),
        *output_norms(shape, "post_attention_layernorm", "post_feedforward_layernorm"),
        *attention(shape, attention_of(config)),
        *gated_mlp(shape, config.count("intermediate_size")),
    )


def fields(config: Config) -> Fields:
    """Return fields with windows, frequencies of their own in layers with windows, and a scale of
    attention that does not follow from the width of a head.

    Raises:
        ConfigError: attention looks ahead.
    """
    expect(config, "use_bidirectional_attention", False, None)
    base = llama.dense_fields(
        config, attention_of(config), activation=config["hidden_activation"]
    ).but(
        output_norms=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logit_cap=config["final_logit_softcapping"],
        local_rope=tuple(
            layer for layer, kind in enumerate(layer_kinds(config)) if kind == "sliding_attention"
        ),
    )
    values = {
        **base.config,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "layernorm_zero_centered_gamma": True,
    }
    return replace(base, config=values)
