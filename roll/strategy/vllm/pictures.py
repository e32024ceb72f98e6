"""Translation of a request's prompt into vLLM's terms, with pictures whose places are known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roll.core.errors import EngineError
from roll.strategy.serving.pictures import Picture

PICTURE_ARGUMENTS: dict[str, Any] = {
    # vLLM's workers normalise, so patches travel as uint8. Patches that are normalised already
    # would be normalised again, without an error.
    "mm_device_do_normalize": True,
    # Patches are sent with every request. A cache of them would take memory for nothing.
    "mm_processor_cache_gb": 0,
}
"""Engine arguments that pictures need; vLLM ignores them for models without vision."""


def engine_prompt(model_config: Any, tokens: Sequence[int], pictures: Sequence[Picture]) -> Any:
    """Make vLLM's input: the tokens as they are, and which of them are pictures.

    vLLM's usual input, tokens and pictures, replaces every `<|image_pad|>` by all tokens of a
    picture. It would expand the placeholders of a prompt again, and those that a policy wrote.

    Args:
        model_config: vLLM's `ModelConfig` of the running engine.

    Raises:
        EngineError: vLLM does not normalise the pictures of its model.
    """
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    if not pictures:
        return tokens_input(list(tokens))
    _require_normalising(model_config)
    sizes = torch.tensor([len(picture.patches) for picture in pictures])
    values = {
        "pixel_values": torch.tensor(np.concatenate([picture.patches for picture in pictures])),
        "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return mm_input(
        list(tokens),
        MultiModalKwargsItems.from_hf_inputs(values, fields),
        {"image": [_digest(picture) for picture in pictures]},
        {"image": [PlaceholderRange(one.place, one.tokens) for one in pictures]},
    )


def _require_normalising(model_config: Any) -> None:
    """Raise EngineError if vLLM would read the uint8 values of patches as they are."""
    pictures = model_config.multimodal_config
    if pictures is None or not pictures.mm_device_do_normalize:
        raise EngineError(
            f"vLLM does not normalise the pictures of {model_config.architecture} itself, which "
            "this framework needs; take the hf engine, or another model"
        )


def _digest(picture: Picture) -> str:
    """Return the name under which vLLM caches embeddings and KV of a picture: a hash of it."""
    digest = hashlib.blake2b(repr(picture.grid).encode(), digest_size=16)
    digest.update(picture.patches.tobytes())
    return digest.hexdigest()
