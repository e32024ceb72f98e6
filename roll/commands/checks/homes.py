"""Checks the `~` of paths in a run file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from roll.config.errors import ConfigError
from roll.config.run import RunConfig


def check_homes(config: RunConfig) -> None:
    """Raise ConfigError for a path that begins with `~` and the name of nobody on this machine.

    Comes before all that looks into such a path.
    """
    for key, path in _paths(config):
        try:
            Path(path).expanduser()
        except RuntimeError:
            name = path.partition("/")[0]
            raise ConfigError(
                f"{key}: {path}: `{name}` is nobody's home on this machine; write the folder itself"
            ) from None


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key, or what stands for it, and the text of each path of a config."""
    yield "output_dir", config.output_dir
    for key, model in config.models.items():
        yield f"{key}.path", model.path
        yield f"{key}.tokenizer", model.tokenizer or model.path
    for source in config.sources:
        yield "path of a source", source.path
