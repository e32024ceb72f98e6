"""Differences between a run file and the checkpoint that the run resumes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.loading.written import without_marks
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError

EXPECTED = (
    "max_steps",
    "epochs",
    "resume",
    "stop_at",
    "output_dir",
    "track",
    "profile",
    "checkpoint",
    "cluster",
)
"""Keys that may differ: they set how long a run is, where it runs and what it leaves behind. So may
the environment variables of a role."""
_ROLES = (
    Role.ACTOR_TRAIN,
    Role.ACTOR_INFER,
    Role.REFERENCE,
    Role.CRITIC,
    Role.PROCESS_REWARD,
)
_BY_NAME = ("teachers", "judges", "opponents", "rewards")
"""Sections of workers with environment variables, by the names that users give them."""
NOT_SET = "not set"
"""What stands for the value of a key that a config does not have."""


def in_words(value: Any) -> str:
    """Return the value of a setting as people read it: null is `none`, and a list, mapping or text
    without content is `empty`."""
    if value is None:
        return "none"
    return "empty" if value in ("", [], {}) else str(value)


def value_at(settings: Mapping[str, Any], key: str) -> str:
    """Return the value of a dotted key of `leaves` in words; `NOT_SET` if it is not there."""
    return in_words(settings[key]) if key in settings else NOT_SET


def changed_keys(checkpoint: Path, config: RunConfig) -> list[str]:
    """Return `key: then -> now` for every value that differs, except under the keys in `EXPECTED`;
    empty if the checkpoint has no config.

    Args:
        checkpoint: folder of the checkpoint, whose `config.yaml` is compared.
        config: the config as the user wrote it.

    Raises:
        CheckpointError: `config.yaml` is no mapping in plain YAML.
    """
    file = checkpoint / "config.yaml"
    if not file.is_file():
        return []
    then = dict(leaves(settings_of(file)))
    now = dict(leaves(config.model_dump(mode="json")))
    return [
        f"{key}: {value_at(then, key)} -> {value_at(now, key)}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not _may_differ(key)
    ]


def _may_differ(key: str) -> bool:
    """Return whether the value of a dotted key may differ without a word."""
    first, *rest = key.split(".")
    own = rest[1:] if first in _BY_NAME else rest if first in _ROLES else []
    return first in EXPECTED or own[:1] == ["env"]


def settings_of(file: Path) -> Mapping[str, Any]:
    """Return the settings in a YAML file; CheckpointError if it holds no mapping or cannot be
    parsed."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
    else:
        if isinstance(found, Mapping):
            return {key: without_marks(value) for key, value in found.items()}
        reason = f"it holds {type(found).__name__}"
    raise CheckpointError(
        f"{file} should hold the settings of the run as a mapping in plain YAML: {reason}; it is "
        "damaged or not roll's. Take another checkpoint, or remove the file to go on uncompared"
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; an empty mapping or list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value
