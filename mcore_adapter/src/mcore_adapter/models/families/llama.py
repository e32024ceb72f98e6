"""llama, mistral, ministral3, qwen2, qwen3, seed_oss: dense models that differ in biases, norms of
heads and the size of queries."""

from __future__ import annotations

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.models.common import attention, gated_mlp, model_table, norms, shape_of
from mcore_adapter.models.config import Config
from mcore_adapter.models.fields import (
    Attention,
    Fields,
    Traits,
    expect,
    rope_parameters,
    windows,
)


def attention_of(config: Config) -> Attention:
    """Return the variant of attention that transformers builds.

    Only some model types use `attention_bias` and similar keys.
    """
    kind = config["model_type"]
    if kind in ("mistral", "ministral3"):
        return Attention()
    if kind == "qwen2":
        return Attention(qkv_bias=True)
    biased = config.flag("attention_bias")
    if kind == "seed_oss":
        return Attention(qkv_bias=biased, out_bias=config.flag("attention_out_bias"))
    return Attention(qkv_bias=biased, out_bias=biased, qk_norm=kind == "qwen3")


def mlp_bias_of(config: Config) -> bool:
    """Return whether the MLPs have biases, which only some model types can have."""
    return config["model_type"] in ("llama", "seed_oss") and config.flag("mlp_bias")


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights, for all dense model types of this module."""
    shape = shape_of(config)
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, attention_of(config)),
        *gated_mlp(shape, config.count("intermediate_size"), bias=mlp_bias_of(config)),
    )


def fields(config: Config) -> Fields:
    """Return the fields of a dense model.

    Raises:
        ConfigError: the MLPs have biases, which cannot be built.
    """
    if mlp_bias_of(config):
        expect(config, "mlp_bias", False)
    base = dense_fields(config, attention_of(config))
    if config["model_type"] != "ministral3":
        return base
    rope = rope_parameters(config)
    growth = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    return base.but(query_growth=growth)


def dense_fields(
    config: Config,
    attention: Attention,
    *,
    width: int | None = None,
    activation: str | None = None,
) -> Fields:
    """Return the fields that almost all families have.

    Args:
        width: number of hidden dimensions of the MLP; None: `intermediate_size`.
        activation: name of the activation function; None: `hidden_act`.
    """
    shape = shape_of(config)
    return Fields(
        config={
            "num_layers": int(shape.num_layers),
            "hidden_size": int(shape.hidden),
            "num_attention_heads": int(shape.num_heads),
            "num_query_groups": int(shape.num_kv_heads),
            "kv_channels": int(shape.head_dim),
            "ffn_hidden_size": config["intermediate_size"] if width is None else width,
            "layernorm_epsilon": config["rms_norm_eps"],
            "init_method_std": config["initializer_range"],
            "activation_func": config["hidden_act"] if activation is None else activation,
            "add_qkv_bias": attention.qkv_bias,
            "qk_layernorm": attention.qk_norm,
            **windows(config),
        },
        rope_width=int(shape.head_dim),
        traits=Traits(out_bias=attention.out_bias),
    )
