"""glm4_moe: grouped-query attention, the experts of deepseek_v3; MTP layers."""

from __future__ import annotations

from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models import llama
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
    num_experts_of,
    shape_of,
    tied_output,
)
from mcore_adapter.models.deepseek_v3 import experts, with_corrected_experts
from mcore_adapter.models.fields import Config, Fields


def table(config: Config) -> ModelTable:
    shape = shape_of(config, num_experts=num_experts_of(config))
    dense = range(config["first_k_dense_replace"])
    sparse = range(len(dense), shape.num_layers)

    def attention_of(ours: str, theirs: str) -> tuple[Param, ...]:
        return attention(
            ours,
            theirs,
            qkv_bias=bool(config.get("attention_bias", False)),
            qk_norm=bool(config.get("use_qk_norm", False)),
        )

    params = [
        *ends(shape),
        *norms(),
        *attention_of(MCORE, HF),
        *gated_mlp(layers=dense),
        *experts(MCORE, HF, layers=sparse),
    ]
    repeats = tied_output(shape)
    for number in range(config.get("num_nextn_predict_layers") or 0):
        ours, theirs = mtp_prefix(number), f"model.layers.{shape.num_layers + number}."
        within = (*norms(ours, theirs), *attention_of(ours, theirs), *experts(ours, theirs))
        params += mtp_layer(number, deepseek_mtp(theirs), within)
        repeats |= mtp_repeats(theirs, shape)
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=tuple(params),
        repeats=repeats,
        config=config,
    )


def fields(config: Config) -> Fields:
    """glm4_moe: deepseek_v3's experts with grouped-query attention, half of each head rotated."""
    # The output projection never has a bias, whatever `attention_bias` says.
    base = llama.fields({**config, "attention_out_bias": False})
    values = {**base.config, "qk_layernorm": bool(config.get("use_qk_norm", False))}
    return with_corrected_experts(Fields(config=values, rope_width=base.rope_width), config)
