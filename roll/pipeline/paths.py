"""Paths as workers must see them: an actor has another working directory than the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from roll.config.model import ModelConfig
from roll.config.run import RunConfig

C = TypeVar("C", bound=RunConfig)


def absolute_paths(config: C) -> C:
    """The same config, with the paths that workers open made absolute.

    These are `output_dir` and the folders of models and tokenizers; a model that is no folder here
    is a name on the hub and stays. Data are read by the driver, and `kwargs` of rewards are the
    user's own: neither is touched. The saved config.yaml keeps what the user wrote.
    """
    changes: dict[str, Any] = {
        "output_dir": str(_absolute(config.output_dir)),
        "model": _model(config.model),
    }
    for key, role in config.computing.items():
        if role.model is None:
            continue
        placed = role.model_copy(update={"model": _model(role.model)})
        group, _, name = key.rpartition(".")
        if group:
            changes[group] = {**changes.get(group, getattr(config, group)), name: placed}
        else:
            changes[key] = placed
    return config.model_copy(update=changes)


def _model(model: ModelConfig) -> ModelConfig:
    paths = {"path": _if_here(model.path)}
    if model.tokenizer is not None:
        paths["tokenizer"] = _if_here(model.tokenizer)
    return model.model_copy(update=paths)


def _if_here(name: str) -> str:
    path = _absolute(name)
    return str(path) if path.exists() else name


def _absolute(name: str) -> Path:
    return Path(name).expanduser().absolute()
