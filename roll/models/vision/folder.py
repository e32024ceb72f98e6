"""Vision part of a model, as the files of its folder describe it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoImageProcessor, PreTrainedConfig

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""Files, of which a model has some, that tell how it reads pictures."""


@dataclass(frozen=True, slots=True)
class VisionPart:
    """Settings by which a model cuts, normalises and merges patches."""

    placeholder: int
    """Id of the token that stands for a merged patch of a picture."""
    merge: int
    """Number of patches along each side of the square that becomes one token."""
    channels: int
    values: int
    """Number of values of a patch: channels x frames of a patch x height x width."""
    rescale: float | None
    """Factor of the uint8 values; None: they are not rescaled."""
    mean: tuple[float, ...] | None
    """Mean of each channel, which is subtracted after rescaling; None: nothing is subtracted or
    divided."""
    std: tuple[float, ...]
    """Standard deviation of each channel, by which is divided after that."""


def read(model: ModelConfig, config: PreTrainedConfig) -> VisionPart:
    """Read the vision part of `model` from its config and its image processor.

    Args:
        config: config of the model, of a type in `parts.FAMILIES`.

    Raises:
        ConfigError: there is no preprocessor_config.json, or it contradicts the model's config.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(
            model.path, backend="pil", trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model {model.path!r} has no image processor that could be loaded (which pictures "
            f"need: preprocessor_config.json): {str(error).strip().splitlines()[0]}"
        ) from error
    tower = config.vision_config
    for name, found, expected in (
        ("merge_size", processor.merge_size, tower.spatial_merge_size),
        ("patch_size", processor.patch_size, tower.patch_size),
        ("temporal_patch_size", processor.temporal_patch_size, tower.temporal_patch_size),
    ):
        if found != expected:
            raise ConfigError(
                f"model {model.path!r}: preprocessor_config.json has {name} {found}, its "
                f"config.json {expected}; take both from one checkpoint"
            )
    return VisionPart(
        placeholder=config.image_token_id,
        merge=tower.spatial_merge_size,
        channels=tower.in_channels,
        values=tower.in_channels * tower.temporal_patch_size * tower.patch_size**2,
        rescale=processor.rescale_factor if processor.do_rescale else None,
        mean=tuple(processor.image_mean) if processor.do_normalize else None,
        std=tuple(processor.image_std),
    )
