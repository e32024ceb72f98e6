"""llama, mistral, qwen2, qwen3, seed_oss: dense models that differ in biases and norms of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import (
    attention,
    ends,
    gated_mlp,
    norms,
    shape_of,
    tied_output,
)


def table(config: Mapping[str, Any]) -> ModelTable:
    kind, shape = config["model_type"], shape_of(config)
    # seed_oss has biases unless its configuration says otherwise
    biased = bool(config.get("attention_bias", kind == "seed_oss"))
    out_biased = bool(config.get("attention_out_bias", biased and kind != "seed_oss"))
    return ModelTable(
        model_type=kind,
        shape=shape,
        params=(
            *ends(shape),
            *norms(),
            *attention(
                qkv_bias=kind == "qwen2" or biased,
                out_bias=kind != "qwen2" and out_biased,
                qk_norm=kind == "qwen3",
            ),
            *gated_mlp(bias=bool(config.get("mlp_bias", False))),
        ),
        dropped=("model.layers.*.self_attn.rotary_emb.inv_freq",),
        repeats=tied_output(shape),
        config=config,
    )
