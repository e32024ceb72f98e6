"""The config.json of a model, as checks read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError
from roll.config.sections.model import ModelConfig


def config_of(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config of a model; None: it is not on this machine.

    Raises:
        ConfigError: it is not a JSON object.
    """
    file = Path(model.path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: expected the config of a model in JSON, {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found
