"""Check that the ranks of a role can share the experts of its model, from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from roll.config.errors import ConfigError
from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import Fsdp2Config

ReadConfig = Callable[[ModelConfig], Mapping[str, Any] | None]
"""Returns the config of a model; None: it is not on this machine."""
NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of transformers for the number of experts of a layer."""


def shared_experts(config: RunConfig, read: ReadConfig) -> Iterator[Callable[[], object]]:
    """Yield a check of each role with expert parallel ranks of `fsdp2`, which raises ConfigError if
    they cannot share the experts of its model. A model that is not here is not looked at."""
    for name, role in config.computing.items():
        if isinstance(role.strategy, Fsdp2Config) and role.strategy.ep > 1:
            model = role.model or config.train_model
            yield partial(_check, name, role.strategy.ep, model, read)


def _check(name: str, ranks: int, model: ModelConfig, read: ReadConfig) -> None:
    """Raise ConfigError unless `ranks` ranks can share the experts of a model.

    Args:
        name: key of the role.
    """
    found = read(model)
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
