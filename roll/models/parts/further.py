"""Names of layers that predict further tokens (MTP). Imports neither torch nor transformers."""

from __future__ import annotations

import re

_FURTHER = re.compile(r"(^|\.)mtp(_[a-z_]+)?\.")
"""Parts of such layers that have names of their own, as in Qwen3-Next."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of what these layers share with the model, and some files store again."""


def is_further_name(name: str, layers: int, further: int) -> bool:
    """Return whether a tensor of a checkpoint belongs to a layer that predicts further tokens.

    Args:
        name: Hugging Face name of the tensor.
        layers: number of decoder layers (`num_hidden_layers`).
        further: number of further layers, 0 if the config does not say
            (`num_nextn_predict_layers`).
    """
    if _FURTHER.search(name):
        return True
    layer = _LAYER.search(name)
    # DeepSeek-V3 and GLM-4 MoE number these layers after the decoder layers.
    beyond = int(layer[1]) - layers if layer else -1
    return 0 <= beyond < further


def is_copy(name: str) -> bool:
    """Return whether a tensor of such a layer repeats the embedding or the head of the model."""
    return name.endswith(_COPIES)
