"""Vision towers, which are modules of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mcore_adapter.models.fields import Vision


def tower(vision: Vision, *, dtype: torch.dtype, recompute: bool) -> nn.Module:
    """Build the tower of a model, with random weights.

    Args:
        recompute: whether to compute the activations of each block again in the backward pass.
    """
    model = _CLASSES[vision.tower](vision.config, dtype)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _qwen2(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build the tower of Qwen2-VL."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as theirs

    config = theirs.Qwen2VLVisionConfig(**_own(values))
    return theirs.Qwen2VisionTransformerPretrainedModel._from_config(config, dtype=dtype)


def _qwen2_5(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build the tower of Qwen2.5-VL."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    config = theirs.Qwen2_5_VLVisionConfig(**_own(values))
    return theirs.Qwen2_5_VisionTransformerPretrainedModel._from_config(config, dtype=dtype)


def _qwen3(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build the tower of Qwen3-VL."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    config = theirs.Qwen3VLVisionConfig(**_own(values))
    return theirs.Qwen3VLVisionModel._from_config(config, dtype=dtype)


def _qwen3_moe(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Build the tower of Qwen3-VL with experts."""
    from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as theirs

    config = theirs.Qwen3VLMoeVisionConfig(**_own(values))
    return theirs.Qwen3VLMoeVisionModel._from_config(config, dtype=dtype)


def _own(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the model type, which early checkpoints give as the whole
    model's."""
    return {name: value for name, value in values.items() if name != "model_type"}


_CLASSES: dict[str, Callable[[dict[str, Any], torch.dtype], Any]] = {
    "qwen2_vl_vision": _qwen2,
    "qwen2_5_vl_vision": _qwen2_5,
    "qwen3_vl_vision": _qwen3,
    "qwen3_vl_moe_vision": _qwen3_moe,
}
"""Function that builds a tower, by its model type."""
