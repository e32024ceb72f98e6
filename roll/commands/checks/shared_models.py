"""Checks, from the config.json of a model, that the ranks of a role can share its rows or experts,
and that Megatron-Core can pack its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from roll.commands.checks.model_config import config_of
from roll.config.errors import ConfigError
from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig

NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of transformers for the number of experts of a layer."""


def check_shared(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield a check of each role with context parallel ranks or packed rows of Megatron-Core, or
    with expert parallel ranks of `fsdp2`, which raises ConfigError if they cannot share the rows or
    the experts of its model, or its rows cannot be packed. A model that is not on this machine is
    not looked at."""
    for name, role in config.computing.items():
        model = role.model or config.train_model
        if isinstance(role.strategy, MegatronConfig) and (role.strategy.cp > 1 or role.packing):
            yield partial(_check_rows, name, role.strategy, model, packs=role.packing)
        if isinstance(role.strategy, Fsdp2Config) and role.strategy.ep > 1:
            yield partial(_check_experts, name, role.strategy.ep, model)


def _check_rows(name: str, strategy: MegatronConfig, model: ModelConfig, *, packs: bool) -> None:
    """Raise ConfigError if the ranks of a role cannot share the rows of its model, or they cannot
    be packed.

    Args:
        name: key of the role.
    """
    try:
        from mcore_adapter.errors import McoreAdapterError
        from mcore_adapter.models.shared_rows import why_not_packed, why_not_shared
    except ImportError:
        return  # `check_engine` tells it
    found = config_of(model)
    try:
        if found and (why := why_not_shared(found, strategy.cp, strategy.tp)):
            raise ConfigError(f"{name}.strategy: {why}")
        if found and packs and (why := why_not_packed(found)):
            raise ConfigError(f"{name}.packing: {why}; leave it out")
    except McoreAdapterError as error:
        raise ConfigError(f"{name}.strategy: {error}") from error


def _check_experts(name: str, ranks: int, model: ModelConfig) -> None:
    """Raise ConfigError unless `ranks` ranks can share the experts of a model.

    Args:
        name: key of the role.
    """
    found = config_of(model)
    if found is None:
        return
    told = {**found, **(found.get("text_config") or {}), **model.overrides}
    if not any("expert" in key for key in told):
        raise ConfigError(
            f"{name}.strategy.ep: {model.path} (model type {told.get('model_type')!r}) has no "
            "experts; leave out ep"
        )
    number = next((told[key] for key in NUMBER_OF_EXPERTS if told.get(key)), None)
    if isinstance(number, int) and number % ranks:
        raise ConfigError(
            f"{name}.strategy.ep: {number} experts of a layer of {model.path} do not divide over "
            f"{ranks} ranks; set ep to a divisor of {number}"
        )
