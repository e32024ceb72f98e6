"""llama, mistral, qwen2, qwen3, seed_oss: dense models that differ in biases and norms of heads."""

from __future__ import annotations

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import (
    attention,
    ends,
    gated_mlp,
    norms,
    shape_of,
    tied_output,
)
from mcore_adapter.models.fields import Config, Fields, expect, windows


def table(config: Config) -> ModelTable:
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


def fields(config: Config) -> Fields:
    """llama, mistral, qwen2, qwen3, seed_oss: the fields that almost all families have."""
    shape, kind = shape_of(config), config["model_type"]
    expect(config, "mlp_bias", False, None)
    biased = bool(config.get("attention_bias", False))
    out_bias = bool(config.get("attention_out_bias", biased and kind != "qwen2"))
    return Fields(
        config={
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.num_heads,
            "num_query_groups": shape.num_kv_heads,
            "kv_channels": shape.head_dim,
            "ffn_hidden_size": config["intermediate_size"],
            "layernorm_epsilon": config["rms_norm_eps"],
            "init_method_std": config.get("initializer_range", 0.02),
            "activation_func": config["hidden_act"],
            "add_qkv_bias": biased or kind == "qwen2",
            "qk_layernorm": kind == "qwen3",
            **windows(config),
        },
        rope_width=shape.head_dim,
        out_bias=out_bias,
    )
