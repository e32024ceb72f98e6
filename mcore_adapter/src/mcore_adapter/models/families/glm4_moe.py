"""glm4_moe: grouped-query attention, experts as in deepseek_v3, MTP layers."""

from __future__ import annotations

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    deepseek_mtp,
    ends,
    gated_mlp,
    mtp_layer,
    mtp_prefix,
    mtp_repeats,
    norms,
    shape_of,
    tied_output,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.families.deepseek_v3 import dense_layers, experts, with_corrected_experts
from mcore_adapter.models.fields import Attention, Fields


def attention_of(config: Config) -> Attention:
    """Return the variant of attention.

    The output projection never has a bias, whatever `attention_bias` says.
    """
    return Attention(qkv_bias=config.flag("attention_bias"), qk_norm=config.flag("use_qk_norm"))


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; with MTP layers, one set of rows for each."""
    shape = shape_of(config, num_experts=config.count("n_routed_experts"))
    dense, sparse = dense_layers(config)
    kinds = attention_of(config)
    params = [
        *ends(shape),
        *norms(shape),
        *attention(shape, kinds),
        *gated_mlp(shape, config.count("intermediate_size"), layers=dense),
        *experts(config, shape, MCORE, HF, layers=sparse),
    ]
    repeats = tied_output(shape)
    for number in range(config["num_nextn_predict_layers"] or 0):
        ours, theirs = mtp_prefix(number), f"model.layers.{shape.num_layers + number:d}."
        within = (
            *norms(shape, ours, theirs),
            *attention(shape, kinds, ours, theirs),
            *experts(config, shape, ours, theirs),
        )
        params += mtp_layer(shape, number, deepseek_mtp(theirs), within)
        repeats |= mtp_repeats(theirs, shape)
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=tuple(params),
        repeats=repeats,
        config=config,
    )


def fields(config: Config) -> Fields:
    """Return fields with grouped-query attention, half of each head rotated, and deepseek_v3's
    experts."""
    return with_corrected_experts(llama.dense_fields(config, attention_of(config)), config)
