"""Checks that a model has the layers that predict further tokens (MTP) which a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.commands.checks.model_config import config_of
from roll.commands.memory.sizes import stored_elements
from roll.config.errors import ConfigError
from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.strategy import MegatronConfig
from roll.models.parts.further import is_further_name


def check_further_layers(config: RunConfig) -> None:
    """Raise ConfigError if layers that predict further tokens are to be trained, and the model has
    none, its files lack them, or they cannot be built. A model that is not on this machine is not
    looked at."""
    strategy, model = config.trained[Role.ACTOR_TRAIN].strategy, config.train_model
    if not isinstance(strategy, MegatronConfig) or strategy.mtp_loss_weight is None:
        return
    try:
        from mcore_adapter.errors import McoreAdapterError
        from mcore_adapter.models.further_layers import why_not_built
    except ImportError:
        return  # `check_engine` tells it
    told = config_of(model)
    if told is None:
        return
    key = f"{Role.ACTOR_TRAIN}.strategy.mtp_loss_weight"
    try:
        why = why_not_built(told, strategy.pp)
    except McoreAdapterError as error:
        raise ConfigError(f"{key}: {error}") from error
    if why is None and not _has_further_layers(told, model):
        why = f"the files of {model.path} have no layers that predict further tokens"
    if why is not None:
        raise ConfigError(f"{key}: {why}; drop it")


def _has_further_layers(told: Mapping[str, Any], model: ModelConfig) -> bool:
    """Return whether the files of a model have such layers, or are not known.

    Args:
        told: content of its config.json, from which the layers could be built.
    """
    layers, further = told.get("num_hidden_layers"), told.get("num_nextn_predict_layers") or 0
    stored = stored_elements(model)
    if not stored or layers is None:
        return True
    return any(is_further_name(name, layers, further) for name in stored)
