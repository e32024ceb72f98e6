"""Values of a model's config that a run replaces (`model.overrides`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from roll.config.errors import nearest
from roll.core.errors import ConfigError

ROPE = "rope_parameters"
"""Key under which transformers keeps the settings of rotary positions; `rope_scaling` is another
name of it."""
_OF_ANY_TYPE = ("rope_theta", "partial_rotary_factor", "mrope_section")
"""Settings of rotary positions that stay if their type changes."""
_FULL = "full_attention"
"""Kind of the layers that read all tokens before their own."""
_ORIGINAL = "original_max_position_embeddings"


def overridden(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config with replaced values; `config` itself if nothing is replaced.

    Raises:
        ConfigError: the config has no such key, or its class refuses a value.
    """
    if not overrides:
        return config
    values = _merged(config.to_dict(), overrides, "model.overrides", config.model_type)
    try:
        changed = type(config).from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(
            f"model.overrides: a config of model type {config.model_type!r} cannot have these "
            f"values: {told}"
        ) from error
    assert isinstance(changed, PreTrainedConfig)
    changed.name_or_path = config.name_or_path
    return changed


def replaced_values(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the replaced values under the names and in the form that config.json has them, for
    readers other than transformers.

    Args:
        config: result of `overridden`.
        overrides: `model.overrides`.
    """
    return _chosen(config.to_dict(), overrides)


def _chosen(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the keys of `overrides`; of sections, only those of their keys. Settings
    of rotary positions are whole, because some depend on others."""
    found = {}
    for key, wanted in _canonical(overrides, values).items():
        value = values[key]
        parts = isinstance(wanted, Mapping) and isinstance(value, Mapping) and key != ROPE
        found[key] = _chosen(value, wanted) if parts else value
    return found


def _canonical(overrides: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides with the names under which transformers keeps them."""
    return {
        ROPE if key == "rope_scaling" and ROPE in known else key: value
        for key, value in overrides.items()
    }


def _merged(
    values: Mapping[str, Any], overrides: Mapping[str, Any], where: str, model_type: str
) -> dict[str, Any]:
    """Return `values` with those of `overrides` in their place.

    Args:
        where: key of `overrides` in the run file, for the message.
        model_type: type of the model, for the message.

    Raises:
        ConfigError: `values` lacks a key.
    """
    found = dict(values)
    for key, value in _canonical(overrides, values).items():
        if key not in values:
            raise ConfigError(
                f"{where}: the config of model type {model_type!r} has no key {key!r}"
                f"{nearest(key, [*values, 'rope_scaling'], most=3)}"
            )
        own = values[key]
        if key == ROPE and isinstance(value, Mapping):
            found[key] = _rope_of_layers(own or {}, value, values, where, model_type)
        elif isinstance(own, Mapping) and isinstance(value, Mapping):
            found[key] = _merged(own, value, f"{where}.{key}", model_type)
        else:
            found[key] = value
    return found


def _rope_of_layers(
    own: Mapping[str, Any],
    wanted: Mapping[str, Any],
    config: Mapping[str, Any],
    where: str,
    model_type: str,
) -> dict[str, Any]:
    """Return the settings of rotary positions, which models with windows have for each kind of
    layer. Settings without a kind are those of full attention, as transformers reads
    `rope_scaling`.

    Raises:
        ConfigError: the settings are of no kind of layer that the model has.
    """
    kinds = [key for key, value in own.items() if isinstance(value, Mapping)]
    if not kinds:
        return _rope(own, wanted, config)
    if _FULL in kinds and not any(isinstance(value, Mapping) for value in wanted.values()):
        wanted = {_FULL: wanted}
    for kind, value in wanted.items():
        if kind not in kinds or not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}.{ROPE}: {model_type!r} has rotary positions for each of "
                f"{', '.join(kinds)}; found {kind!r}: {value!r}, expected one of these and its "
                "settings"
            )
    return {**own, **{kind: _rope(own[kind], value, config) for kind, value in wanted.items()}}


def _rope(
    own: Mapping[str, Any], wanted: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of rotary positions: those wanted, and of the checkpoint's those that
    belong to the same type or to any.

    A type that stretches positions gets the number of positions of the checkpoint as the original
    one, unless it is told.
    """
    told = dict(wanted)
    if "type" in told:
        told.setdefault("rope_type", told.pop("type"))
    same = told.get("rope_type", own.get("rope_type")) == own.get("rope_type")
    kept = own if same else {key: own[key] for key in _OF_ANY_TYPE if key in own}
    found = {**kept, **told}
    if found.get("rope_type", "default") in ("yarn", "llama3", "longrope"):
        found.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
    return found
