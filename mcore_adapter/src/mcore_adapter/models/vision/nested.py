"""Keys of a `config.json` that describes a language model and a vision tower.

The language model has its keys under `text_config`. Early checkpoints of Qwen2-VL and Qwen2.5-VL
have them at the top. The tower has its keys under `vision_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.errors import ConfigError
from mcore_adapter.models.defaults.vision import LANGUAGE, TOWER

SEES = frozenset(TOWER)
"""Model types with a vision tower."""
_COUNTS = {key for keys in TOWER.values() for key in keys} - {"deepstack_visual_indexes"}
"""Keys of towers that hold a count, which is at least 1."""
_MOST_BLOCKS = 10_000
"""Largest number of blocks of a tower."""
_MROPE = (("type", "mrope"), ("rope_type", "mrope"))


def flattened(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `config.json` with the keys of the language model at the top.

    The keys of the tower stay under `vision_config`, where missing ones have their defaults.

    Args:
        kind: the `model_type`, one of `SEES`.

    Raises:
        ConfigError: a value of the tower has the wrong type or is out of range, or the values of
            one of both are no object.
    """
    found = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
    text = _object(config, "text_config")
    if text:
        found = {k: v for k, v in found.items() if k not in LANGUAGE[kind]}
        found |= {k: v for k, v in text.items() if k != "model_type"}
    found["tie_word_embeddings"] = _tied(kind, config, text)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), dict):
            found[name] = _without_mrope(found[name])
    tower = _object(config, "vision_config")
    for name, value in tower.items():
        _check(name, value)
    found["vision_config"] = {**TOWER[kind], **tower}
    return found


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object under a key, empty if the key is missing; ConfigError: it is no object."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: {name} is {found!r}, expected an object")
    return found


def _tied(kind: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Return whether the output layer shares its weight with the embedding.

    transformers reads the key at the top. Versions before 5 wrote that of Qwen2-VL and Qwen2.5-VL
    into `text_config`.
    """
    outer = config.get("tie_word_embeddings")
    if kind in ("qwen2_vl", "qwen2_5_vl") and not outer:
        return text.get("tie_word_embeddings", outer)
    return outer


def _without_mrope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters with `default` as the type in place of its other name, `mrope`.

    All models with a tower have positions on three axes, so the name tells nothing.
    """
    return {k: "default" if (k, v) in _MROPE else v for k, v in values.items()}


def _check(name: str, value: Any) -> None:
    """Raise `ConfigError` unless a value of the tower has the type of its key and is in range."""
    expected = None
    if name in _COUNTS:
        most = _MOST_BLOCKS if name == "depth" else None
        if not _whole(value) or value < 1 or (most is not None and value > most):
            expected = "a whole number from 1" + (f" to {most}" if most else "")
    elif name == "deepstack_visual_indexes" and not (
        isinstance(value, list) and all(_whole(each) and each >= 0 for each in value)
    ):
        expected = "a list of numbers of blocks"
    if expected is not None:
        raise ConfigError(f"config.json: vision_config.{name} is {value!r}, expected {expected}")


def _whole(value: object) -> bool:
    """Return True for a whole number; true and false are no numbers here."""
    return isinstance(value, int) and not isinstance(value, bool)
