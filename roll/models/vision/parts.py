"""Parts of a model that sees: the tower, the projector behind it and the language model."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedConfig, PreTrainedModel

from roll.config.sections.model import ModelPart
from roll.core.errors import ConfigError

FAMILIES = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Model types whose vision part is known: `visual`, which merges squares of patches into one token
each, beside `language_model`, which has three positions for each token."""
_TOWER = "visual."
_PROJECTORS = ("visual.merger.", "visual.deepstack_merger_list.")
"""Beginnings of the names of modules that map patches to the width of the language model."""


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a model with this config reads pictures."""
    return config.model_type in FAMILIES


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model with a head that makes hidden states of token ids."""
    found = model.get_decoder() if sees(model.config) else model.base_model
    assert isinstance(found, PreTrainedModel)
    return found


def part_of(name: str) -> ModelPart:
    """Return the part that a parameter or module of a model that sees belongs to.

    Args:
        name: full name in a model with a head, such as `model.visual.merger.mlp.0.weight`.
    """
    inner = name.removeprefix("model.")
    if not inner.startswith(_TOWER):
        return "language"
    return "projector" if inner.startswith(_PROJECTORS) else "vision"


def freeze(model: PreTrainedModel, parts: Collection[ModelPart]) -> None:
    """Leave the parameters of some parts out of training; without parts, change nothing.

    Raises:
        ConfigError: the model has no such parts, or nothing is left to train.
    """
    if not parts:
        return
    require_parts(model.config, "model.freeze")
    for name, parameter in model.named_parameters():
        if part_of(name) in parts:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.freeze: {', '.join(parts)} are all parts of the model, so nothing is trained"
        )


def require_parts(config: PreTrainedConfig, key: str) -> None:
    """Raise ConfigError if the model has one part only.

    Args:
        key: config key that names parts, for the message.
    """
    if not sees(config):
        raise ConfigError(
            f"{key}: model type {config.model_type!r} is not divided into vision, projector and "
            f"language; {', '.join(sorted(FAMILIES))} are. Leave out `{key}`"
        )
