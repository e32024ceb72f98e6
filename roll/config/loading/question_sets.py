"""The way from YAML files and options to the validated settings of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from roll.config.base import Config
from roll.config.errors import ConfigError, nearest
from roll.config.evaluation import ChatConfig, EvalConfig, QuestionSet
from roll.config.loading.compose import compose
from roll.config.loading.explain import describe
from roll.config.loading.layers import Origins
from roll.config.loading.overrides import COMMAND_LINE, in_order, parse_override, set_key

SHIPPED = Path(__file__).parents[1] / "question_sets"
"""Folder of the sets that the package has, one YAML file each."""

C = TypeVar("C", bound=Config)


def set_file(name: str) -> Path:
    """Return the file of a set: `name` itself if it ends in .yaml or .yml, else the shipped one.

    Raises:
        ConfigError: there is no shipped set of this name.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    known = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(
            f"--sets {name}: no set has this name{nearest(name, known)} (shipped: "
            f"{', '.join(known)}; a file of yours ends in .yaml)"
        )
    return known[name]


def load_set(file: Path, overrides: Sequence[str] = ()) -> QuestionSet:
    """Read, compose and validate the file of a set; `defaults` and `${...}` work as in a run file.

    A local path in the overrides stands in place of the set's dataset on the hub, `subset` and
    `split` included.

    Args:
        overrides: `key.sub=value`, which win over the file.

    Raises:
        ConfigError: something is wrong; the text names file, line, key and value.
    """
    data, origins = compose(file, overrides)
    _forget_hub(data, origins)
    return _validated(QuestionSet, data, origins)


def _forget_hub(data: dict[str, Any], origins: Origins) -> None:
    """Remove `subset` and `split` of the file from sources to which the overrides give a local
    path, and which are refused there; `split` stays for a folder, which may have several."""
    sources = data.get("data", {}).get("sources", []) if isinstance(data.get("data"), dict) else []
    for i, source in enumerate(sources if isinstance(sources, list) else []):
        key = f"data.sources.{i}"
        if not isinstance(source, dict) or origins.where(f"{key}.path") != COMMAND_LINE:
            continue
        path = Path(str(source.get("path"))).expanduser()
        for name in ("subset", "split") if path.is_file() else ("subset",) * path.is_dir():
            if origins.where(f"{key}.{name}") != COMMAND_LINE:
                source.pop(name, None)


def load_serving(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> EvalConfig:
    """Validate how a model is served.

    Args:
        settings: plain values by key, from the options of the command.
        overrides: `key.sub=value`, which win over them.

    Raises:
        ConfigError: something is wrong; the text names key and value.
    """
    return _served(EvalConfig, "roll eval", settings, overrides)


def load_chat(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> ChatConfig:
    """Validate how a model is served that talks; see `load_serving`."""
    return _served(ChatConfig, "roll chat", settings, overrides)


def _served(
    model: type[C], command: str, settings: Mapping[str, Any], overrides: Sequence[str]
) -> C:
    """Return the settings of a command with its overrides, validated."""
    data, origins = dict(settings), Origins(Path(command))
    for change in in_order([parse_override(text) for text in overrides]):
        set_key(data, change, origins)
    return _validated(model, data, origins)


def _validated(model: type[C], data: dict[str, Any], origins: Origins) -> C:
    """Return the values as `model`; ConfigError that names every problem and its place."""
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise ConfigError(describe(error, model, data, origins)) from None
