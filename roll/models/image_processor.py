"""Image processors: how a model's pictures are resized and cut into patches.

Pillow does it, not torchvision: the two resize differently (by one step of uint8), and what trainer
and engine read must not depend on what is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from roll.config.sections.data import PicturesConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, PictureError
from roll.models.load import load_config

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Image processor of a model of the Qwen-VL families (Qwen2-VL, 2.5-VL, 3-VL, 3.5)."""

    token_id: int
    """Id of the placeholder token, of which a row has one for each merged patch."""
    processor: Any
    """The `Qwen2VLImageProcessorPil` of the model."""

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the number of patches of a picture with this height and width, in pixels: frames,
        rows, columns.

        Raises:
            PictureError: the picture is too long and narrow.
        """
        size, patch = self.processor.size, self.processor.patch_size
        factor = patch * self.processor.merge_size
        try:
            resized = smart_resize(
                height, width, factor, size["shortest_edge"], size["longest_edge"]
            )
        except ValueError as error:
            raise PictureError(f"{height} x {width} pixels: {error}") from error
        return 1, resized[0] // patch, resized[1] // patch

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the number of merged patches, and so of placeholders, of a picture."""
        return math.prod(grid) // int(self.processor.merge_size) ** 2

    def patches(self, picture: Image) -> NDArray[np.uint8]:
        """Return the patches of a picture in RGB, uint8 `[P, C]`, neither rescaled nor normalised;
        see `roll.core.pictures.Address`."""
        found = self.processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")[
            "pixel_values"
        ]
        return np.asarray(found, dtype=np.uint8)


def load_image_processor(
    model: ModelConfig, limits: PicturesConfig, *, fetch: bool = True
) -> ImageProcessor:
    """Load the image processor of `model`.

    Args:
        limits: its `min_pixels` and `max_pixels` replace those of the processor.
        fetch: if True, files that are not on this machine are downloaded from the hub.

    Raises:
        ConfigError: the model takes no pictures, or its image processor is of another kind.
    """
    token = getattr(load_config(model), "image_token_id", None)
    if token is None:
        raise ConfigError(
            f"model {model.path!r} takes no pictures (its config has no image_token_id); use a "
            "vision-language model, or rows without pictures"
        )
    try:
        processor = AutoImageProcessor.from_pretrained(
            model.path,
            backend="pil",
            trust_remote_code=model.trust_remote_code,
            local_files_only=not fetch,
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {model.path!r} has no image processor: {reason}") from error
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        raise ConfigError(
            f"model {model.path!r} has the image processor {type(processor).__name__}; known is "
            "that of the Qwen-VL families (Qwen2VLImageProcessor)"
        )
    low, high = _range(processor.size["shortest_edge"], processor.size["longest_edge"], limits)
    processor.size = type(processor.size)(shortest_edge=low, longest_edge=high)
    return ImageProcessor(int(token), processor)


def _range(low: int, high: int, limits: PicturesConfig) -> tuple[int, int]:
    """Return smallest and largest area of a picture, in pixels.

    A limit that the user set wins over the processor's own other one. Then nothing is enlarged, for
    pictures that are enlarged are rounded up to whole tokens, so above the largest area.

    Args:
        low: smallest area of the image processor.
        high: its largest area.
        limits: those of the user, which replace these.
    """
    if limits.max_pixels is not None:
        high = limits.max_pixels
        low = low if low <= high else 1
    if limits.min_pixels is not None:
        low = limits.min_pixels
        high = max(low, high)
    return low, high
