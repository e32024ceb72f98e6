"""Absolute paths for workers, whose working directory is not the driver's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from roll.config.agentic_base import AgenticBase
from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig

C = TypeVar("C", bound=RunConfig)


def absolute_paths(config: C) -> C:
    """Return the config with absolute paths where workers open them.

    These are `output_dir`, the folders of models and tokenizers, and the files of corpora. A model
    whose folder does not exist here is taken for a name on the hub and stays as it is. Paths of
    data stay, because the driver reads them; so do the `kwargs` of rewards, because only the user
    knows their meaning. The saved config.yaml keeps the paths that the user wrote.
    """
    placed = config.with_models(_placed)
    changes: dict[str, Any] = {"output_dir": str(_absolute(config.output_dir))}
    if isinstance(placed, AgenticBase):
        changes["corpora"] = {
            name: corpus.model_copy(update={"path": str(_absolute(corpus.path))})
            for name, corpus in placed.corpora.items()
        }
    return placed.model_copy(update=changes)


def _placed(key: str, model: ModelConfig) -> ModelConfig:
    """Return the model with absolute paths of itself and its tokenizer, if they exist here."""
    paths = {"path": _if_here(model.path)}
    if model.tokenizer is not None:
        paths["tokenizer"] = _if_here(model.tokenizer)
    return model.model_copy(update=paths)


def _if_here(name: str) -> str:
    """Return the absolute path if it exists on this machine, else `name` unchanged."""
    path = _absolute(name)
    return str(path) if path.exists() else name


def _absolute(name: str) -> Path:
    """Return the absolute path, with `~` replaced by the home folder."""
    return Path(name).expanduser().absolute()
