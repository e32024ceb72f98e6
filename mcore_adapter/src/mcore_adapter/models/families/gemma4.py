"""gemma4_text: gemma3 with wider heads in layers without a window, norms of values, and a factor
for the output of each layer. Norms are centred on one.

Models with per-layer embeddings, shared keys and values or experts are not supported (E2B, E4B and
26B-A4B).
"""

from __future__ import annotations

import math
from dataclasses import replace

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    gated_mlp,
    model_table,
    norms,
    output_norms,
    same,
    shape_of,
)
from mcore_adapter.models.config import Config, Size
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, GlobalHeads, expect, layer_kinds


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights, with the layers' two kinds of heads.

    Raises:
        ConfigError: the model has parts that are not supported.
    """
    _check_parts(config)
    shape, wide = shape_of(config), global_heads(config)
    narrow = tuple(layer for layer in range(shape.num_layers) if layer not in set(wide.layers))
    kinds = Attention(qk_norm=True)
    heads = replace(shape, head_dim=wide.width, num_kv_heads=wide.groups)
    of_wide = replace(kinds, keys_as_values=wide.keys_as_values)
    return model_table(
        config,
        shape,
        *norms(shape, mlp="pre_feedforward_layernorm"),
        *output_norms(shape, "post_attention_layernorm", "post_feedforward_layernorm"),
        *attention(shape, kinds, layers=narrow),
        *attention(heads, of_wide, layers=wide.layers, own=True),
        *gated_mlp(shape, config.count("intermediate_size")),
        same(MCORE + "layer_scalar", HF + "layer_scalar", (1,)),
        divisible={
            "num_key_value_heads": shape.num_kv_heads,
            "num_global_key_value_heads": wide.groups,
        },
    )


def _check_parts(config: Config) -> None:
    """Raise `ConfigError` if the model has parts that are not supported."""
    expect(config, "hidden_size_per_layer_input", 0)
    expect(config, "num_kv_shared_layers", 0)
    expect(config, "enable_moe_block", False)
    expect(config, "attention_bias", False)


def global_heads(config: Config) -> GlobalHeads:
    """Return the heads of the layers without a window.

    They are those of `per_layer_config`, or else of keys whose names have `global` in them.

    Raises:
        ConfigError: `per_layer_config` does not change just these layers, and all of them alike.
    """
    layers = tuple(i for i, kind in enumerate(layer_kinds(config)) if kind == "full_attention")
    shared, groups = config.flag("attention_k_eq_v"), config.count("num_key_value_heads")
    told = config["per_layer_config"]
    if told is None:
        width, other = config.count("global_head_dim"), config["num_global_key_value_heads"]
        if shared and other is not None:
            groups = Size(other, "num_global_key_value_heads")
        return GlobalHeads(layers=layers, width=width, groups=groups, keys_as_values=shared)
    # It holds what differs from the other layers: nothing, if all heads are alike.
    changed = {int(layer): values for layer, values in told.items()}
    values: dict[str, int] = next(iter(changed.values()), {})
    known = values.keys() <= {"head_dim", "num_key_value_heads"}
    others = set(changed) not in (set(), set(layers))
    if others or not known or any(v != values for v in changed.values()):
        raise ConfigError(
            f"config.json: per_layer_config changes layers {sorted(changed)}, expected none, or "
            f"the same head_dim and num_key_value_heads for all of {list(layers)}, the "
            "full_attention of layer_types, and nothing else"
        )
    return GlobalHeads(
        layers=layers,
        width=Size(values.get("head_dim", config.count("head_dim")), "per_layer_config.head_dim"),
        groups=Size(values.get("num_key_value_heads", groups), "per_layer_config"),
        keys_as_values=shared,
    )


def fields(config: Config) -> Fields:
    """Return fields with two kinds of heads, frequencies of their own in layers with windows, and
    attention without a scale.

    Raises:
        ConfigError: the model has parts that are not supported.
    """
    _check_parts(config)
    expect(config, "use_bidirectional_attention", None, "vision")
    wide = global_heads(config)
    base = llama.dense_fields(
        config, Attention(qk_norm=True), activation=config["hidden_activation"]
    ).but(
        output_norms=True,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logit_cap=config["final_logit_softcapping"],
        local_rope=tuple(
            layer for layer in range(config["num_hidden_layers"]) if layer not in set(wide.layers)
        ),
        global_heads=wide,
    )
    values = {**base.config, "softmax_scale": 1.0}
    return replace(base, config=values, rope_width=int(wide.width))
