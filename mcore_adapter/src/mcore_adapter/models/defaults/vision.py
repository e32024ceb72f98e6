"""Defaults for keys that the `config.json` of a model that sees leaves out, see `models.defaults`.

A test compares them with the classes of transformers.
"""

from __future__ import annotations

from mcore_adapter.models.defaults.common import Defaults

_QWEN2: Defaults = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": 8,
    "head_dim": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "layer_types": None,
    "pad_token_id": None,
}
_QWEN3: Defaults = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "attention_bias": False,
    "pad_token_id": None,
}
LANGUAGE: dict[str, Defaults] = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_vl_moe": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
}
"""Defaults of the language model of each `model_type`: those of its `text_config`."""

_PATCHES: Defaults = {
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 16,
}
_QWEN3_TOWER: Defaults = {
    **_PATCHES,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
TOWER: dict[str, Defaults] = {
    "qwen2_vl": {
        **_PATCHES,
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "patch_size": 14,
    },
    "qwen2_5_vl": {
        **_PATCHES,
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
    },
    "qwen3_vl": _QWEN3_TOWER,
    "qwen3_vl_moe": _QWEN3_TOWER,
}
"""Defaults of the vision tower of each `model_type`, as far as tables and fields read them: those
of its `vision_config`."""
SECTIONS: dict[str, list[int]] = {
    "qwen2_vl": [16, 24, 24],
    "qwen2_5_vl": [16, 24, 24],
    "qwen3_vl": [24, 20, 20],
    "qwen3_vl_moe": [24, 20, 20],
}
"""Default of `mrope_section` of each `model_type`."""
