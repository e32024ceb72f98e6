"""glm4: biases of queries, keys and values, norms also behind attention and MLP, and half of each
head rotated, in pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import attention, model_table, norms, output_norms, shape_of
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.families.phi3 import fused_mlp
from mcore_adapter.models.fields import Attention, Fields


def attention_of(config: Config) -> Attention:
    """Return the variant of attention, whose output projection never has a bias."""
    return Attention(qkv_bias=config.flag("attention_bias"))


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; a layer has four norms."""
    shape = shape_of(config)
    return model_table(
        config,
        shape,
        *norms(shape),
        *output_norms(shape, "post_self_attn_layernorm", "post_mlp_layernorm"),
        *attention(shape, attention_of(config)),
        *fused_mlp(shape, config.count("intermediate_size")),
    )


def fields(config: Config) -> Fields:
    """Return fields with norms of outputs, and neighbouring dimensions rotated in pairs."""
    base = llama.dense_fields(config, attention_of(config)).but(output_norms=True)
    return replace(base, config={**base.config, "rotary_interleaved": True})
