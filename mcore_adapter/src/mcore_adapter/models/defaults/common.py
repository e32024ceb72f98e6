"""Defaults that several model types share."""

from __future__ import annotations

from typing import Any

Defaults = dict[str, Any]

COMMON: Defaults = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
"""Defaults of most model types. `num_key_value_heads` null: as many heads of keys and values as of
queries. `head_dim` null: the hidden size divided by the number of heads."""
WINDOWS: Defaults = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
"""Defaults of sliding windows in the families of Qwen."""
DELTA_NET: Defaults = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}
"""Defaults of gated delta nets, and which layers have one."""
